package dev.stele.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.Serializable;
import java.net.ConnectException;
import java.net.NoRouteToHostException;
import java.net.UnknownHostException;
import java.nio.channels.UnresolvedAddressException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import org.apache.arrow.flight.Action;
import org.apache.arrow.flight.CallOption;
import org.apache.arrow.flight.CallOptions;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightDescriptor;
import org.apache.arrow.flight.FlightInfo;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.FlightStatusCode;
import org.apache.arrow.flight.Location;
import org.apache.arrow.flight.Result;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.sql.util.ArrowUtils;

/** Asks the masters: for plans of scans, and to list, create, alter and drop tables. Their gRPC port answers Flight's calls. */
record Cluster(List<String> masters) implements Serializable {
  static final ObjectMapper JSON = new ObjectMapper();
  private static final int DEFAULT_PORT = 7051;
  private static final long CALL_MS = 12_000;
  private static final long PATIENCE_MS = 5_000;
  private static final long BUSY_MS = 30_000;
  private static final long CHANGE_MS = 60_000;
  private static final long PAUSE_MS = 200;
  private static final long FOLLOWER_WAIT_MS = 1_000;
  private static final byte VERSION = 1;
  private static final Set<Integer> NOT_YET =
      Set.of(SteleException.NOT_READY, SteleException.UNKNOWN_OUTCOME, SteleException.TIMED_OUT);

  /** A planned scan. `rows`: an estimate of the whole table; -1: not known. `about`: see docs/flight.md. */
  record Plan(Schema schema, List<TabletPlace> tablets, long rows, JsonNode about) {}

  /** The Flight server of a replica. `zone`: where its node is; "" if nobody said. */
  record Replica(String address, String zone) implements Serializable {
    String host() {
      return address.substring(0, address.lastIndexOf(':'));
    }
  }

  /** One tablet of a plan: its ticket and its replicas, the leader first. */
  record TabletPlace(byte[] ticket, List<Replica> replicas) implements Serializable {
    String tabletId() {
      return fieldsOf(ticket).path("tablet").asText();
    }

    /** With a ticket by which followers serve what they have, and ask their leader where they cannot know. */
    TabletPlace ofAnyReplica() {
      return new TabletPlace(encoded(fieldsOf(ticket).put("any_replica", true).put("wait_ms", FOLLOWER_WAIT_MS)), replicas);
    }
  }

  /** A command without columns, conditions or snapshot. */
  static ObjectNode command(String table) {
    return JSON.createObjectNode().put("table", table);
  }

  Plan plan(ObjectNode command) {
    var descriptor = FlightDescriptor.command(encoded(command));
    FlightInfo info = ask(client -> client.getInfo(descriptor, timeout(CALL_MS)), false);
    var about = parsed(info.getAppMetadata());
    var zones = about.path("zones");
    var tablets = new ArrayList<TabletPlace>();
    for (var endpoint : info.getEndpoints()) {
      var replicas =
          endpoint.getLocations().stream()
              .map(l -> l.getUri().getAuthority())
              .map(address -> new Replica(address, zones.path(address).asText("")))
              .toList();
      tablets.add(new TabletPlace(endpoint.getTicket().getBytes(), replicas));
    }
    return new Plan(info.getSchema(), tablets, info.getRecords(), about);
  }

  JsonNode act(String name, ObjectNode body) {
    return act(name, body, false);
  }

  /** An action that changes something. It has ids, so that masters who are asked again make the change once. */
  JsonNode change(String name, ObjectNode body) {
    return act(name, body, true);
  }

  private JsonNode act(String name, ObjectNode body, boolean changes) {
    var action = new Action(name, body.toString().getBytes(StandardCharsets.UTF_8));
    return ask(
        client -> {
          Iterator<Result> results = client.doAction(action, timeout(CALL_MS));
          return parsed(results.hasNext() ? results.next().getBody() : new byte[0]);
        },
        changes);
  }

  /** 32 hex digits that nothing else has. */
  static String newId() {
    return UUID.randomUUID().toString().replace("-", "");
  }

  /**
   * The first answer of any master. If no master gives one, all are asked again, for a time. It is PATIENCE_MS after a master
   * was last heard. If one says that it is not done yet, or that it does not know (NOT_YET), it is BUSY_MS at most. For a change
   * that may have reached a master it is CHANGE_MS, whether or not masters are heard. Then its outcome is unknown.
   */
  private <T> T ask(Function<FlightClient, T> call, boolean changes) {
    long begun = System.nanoTime();
    long heard = begun;
    SteleException busy = null;
    while (true) {
      var reasons = new ArrayList<String>();
      boolean answered = false;
      for (var address : masters) {
        try (var allocator = allocator("stele-plan");
            var client = client(allocator, address)) {
          return call.apply(client);
        } catch (FlightRuntimeException e) {
          var error = errorOf(e, address);
          if (NOT_YET.contains(error.code)) {
            busy = error;
            answered = true;
          } else if (error.code != SteleException.UNAVAILABLE) {
            throw error;
          } else if (changes && mayBeSent(e)) {
            busy = error;
          }
          reasons.add(error.said.startsWith(address) ? error.said : address + ": " + error.said);
        } catch (InterruptedException e) {
          throw interrupted();
        }
      }
      long now = System.nanoTime();
      heard = answered ? now : heard;
      var told = String.join(", ", reasons);
      if (busy != null && passedMs(begun, now) > (changes ? CHANGE_MS : BUSY_MS)) {
        throw changes
            ? new SteleException(SteleException.UNKNOWN_OUTCOME, told + "; the change may have been made: look before you repeat it")
            : busy;
      }
      if ((busy == null || !changes) && passedMs(heard, now) > PATIENCE_MS) {
        throw new SteleException(SteleException.UNAVAILABLE, "no master answers: " + told);
      }
      pause(PAUSE_MS);
    }
  }

  private static long passedMs(long from, long to) {
    return TimeUnit.NANOSECONDS.toMillis(to - from);
  }

  /** Whether a call that failed may have reached its master: not if there was no connection. */
  private static boolean mayBeSent(Throwable error) {
    for (var cause = error.getCause(); cause != null; cause = cause.getCause()) {
      if (cause instanceof ConnectException
          || cause instanceof NoRouteToHostException
          || cause instanceof UnknownHostException
          || cause instanceof UnresolvedAddressException) {
        return false;
      }
    }
    return true;
  }

  static FlightClient client(BufferAllocator allocator, String address) {
    int colon = address.lastIndexOf(':');
    boolean bare = colon < 0 || address.endsWith("]");
    var host = bare ? address : address.substring(0, colon);
    int port;
    try {
      port = bare ? DEFAULT_PORT : Integer.parseInt(address.substring(colon + 1));
    } catch (NumberFormatException e) {
      port = -1;
    }
    if (port < 1 || port > 65_535) {
      throw new SteleException(SteleException.INVALID_ARGUMENT, "address '" + address + "': expected HOST or HOST:PORT");
    }
    return FlightClient.builder(allocator, Location.forGrpcInsecure(host, port))
        .maxInboundMessageSize(Integer.MAX_VALUE)
        .build();
  }

  static BufferAllocator allocator(String name) {
    return ArrowUtils.rootAllocator().newChildAllocator(name, 0, Long.MAX_VALUE);
  }

  static CallOption timeout(long millis) {
    return CallOptions.timeout(millis, TimeUnit.MILLISECONDS);
  }

  /** A version byte and JSON: the form of commands and tickets. */
  static byte[] encoded(ObjectNode fields) {
    var json = fields.toString().getBytes(StandardCharsets.UTF_8);
    var raw = new byte[json.length + 1];
    raw[0] = VERSION;
    System.arraycopy(json, 0, raw, 1, json.length);
    return raw;
  }

  static ObjectNode fieldsOf(byte[] ticket) {
    try {
      if (ticket.length > 0 && ticket[0] == VERSION
          && JSON.readTree(ticket, 1, ticket.length - 1) instanceof ObjectNode fields) {
        return fields;
      }
    } catch (IOException e) {
      // told below
    }
    throw new SteleException(SteleException.INTERNAL, "a master gave a ticket that this reader does not know; use the jar of the cluster's release");
  }

  private static JsonNode parsed(byte[] raw) {
    try {
      return raw == null || raw.length == 0 ? JSON.createObjectNode() : JSON.readTree(raw);
    } catch (IOException e) {
      throw new SteleException(SteleException.INTERNAL, "a master gave an answer that this reader does not know; use the jar of the cluster's release");
    }
  }

  /** The error of Stele in a Flight error. The gRPC port tells its code in one way, the Flight server in another. */
  static SteleException errorOf(FlightRuntimeException e, String address) {
    var status = e.status();
    var told = status.metadata();
    try {
      if (told != null && told.containsKey("stele-code")) {
        return new SteleException(Integer.parseInt(told.get("stele-code")), String.valueOf(status.description()));
      }
      if (told != null && told.containsKey("grpc-status-details-bin")) {
        var fields = JSON.readTree(told.getByte("grpc-status-details-bin"));
        return new SteleException(fields.path("code").asInt(SteleException.INTERNAL), fields.path("message").asText());
      }
    } catch (IOException | IllegalArgumentException ignored) {
      // not ours
    }
    var description = status.description();
    var first = description == null ? status.code().toString() : description.lines().findFirst().orElse("");
    if (first.equals("io exception")) { // all that netty says where nobody listens
      first = "it cannot be reached; check the address";
    }
    return new SteleException(
        status.code() == FlightStatusCode.TIMED_OUT
            ? SteleException.TIMED_OUT
            : switch (status.code()) {
              case UNAVAILABLE, CANCELLED, INTERNAL -> SteleException.UNAVAILABLE;
              case INVALID_ARGUMENT -> SteleException.INVALID_ARGUMENT;
              default -> SteleException.INTERNAL;
            },
        address + ": " + first);
  }

  static void pause(long millis) {
    try {
      Thread.sleep(millis);
    } catch (InterruptedException e) {
      throw interrupted();
    }
  }

  static SteleException interrupted() {
    Thread.currentThread().interrupt();
    return new SteleException(SteleException.UNAVAILABLE, "the task was interrupted; run it again");
  }
}
