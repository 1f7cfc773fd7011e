package dev.stele.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.FlightStream;
import org.apache.arrow.flight.Ticket;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.VectorSchemaRoot;

/**
 * One tablet of a scan, from any replica that serves it. It does what stele.client.tablet_scan does: whichever
 * replicas it reads, each row comes once, at the ticket's snapshot. If a replica fails, it continues at another one, after
 * the key that came with the last batch. It fails once no replica has served it for 60 s, or 600 s while nodes are busy.
 */
final class TabletScan implements AutoCloseable {
  /** Where the replicas are now. Called when none of the known ones serves. */
  interface Locate {
    /** The tablet as the masters know it; null if they do not answer. Throws NOT_FOUND if it is gone. */
    Cluster.TabletPlace now(String tabletId);
  }

  private static final int CONNECT_MS = 1_000;
  private static final long STALL_MS = 15_000;
  private static final long PATIENCE_MS = 60_000;
  private static final int BUSY_TIMES = 10;
  private static final long BACKOFF_MS = 50;
  private static final long BUSY_BACKOFF_MAX_MS = 1_000;
  /** INVALID_ARGUMENT, SCHEMA_MISMATCH, SNAPSHOT_TOO_OLD, CLOCK_AHEAD, UNSUPPORTED_VERSION, PERMISSION_DENIED. */
  private static final Set<Integer> DEFINITE = Set.of(20, 29, 32, 33, 35, 37);

  private static final ScheduledExecutorService WATCH =
      Executors.newSingleThreadScheduledExecutor(
          work -> {
            var thread = new Thread(work, "stele-watch");
            thread.setDaemon(true);
            return thread;
          });

  private final ObjectNode ticket;
  private final String tabletId;
  private final Locate locate;
  private final Near near;
  private final long patienceMs;
  private final BufferAllocator allocator = Cluster.allocator("stele-scan");
  private final Map<String, String> said = new LinkedHashMap<>();
  private List<String> addresses;
  private int next;
  private FlightClient client;
  private FlightStream stream;
  private long since = System.nanoTime();
  private long allowedMs;
  private long busyBackoffMs = BACKOFF_MS;
  private boolean busy;
  private boolean resumable = true;
  private String incarnation; // of the rows given

  TabletScan(Cluster.TabletPlace place, Near near, Locate locate) {
    this(place, near, locate, PATIENCE_MS);
  }

  TabletScan(Cluster.TabletPlace place, Near near, Locate locate, long patienceMs) {
    this.near = near;
    this.patienceMs = patienceMs;
    this.allowedMs = patienceMs;
    this.ticket = Cluster.fieldsOf(place.ticket());
    this.tabletId = place.tabletId();
    this.addresses = addressesOf(place);
    this.locate = locate;
  }

  /** The next batch that has rows; null at the end. It is valid until the next call. */
  VectorSchemaRoot next() {
    while (true) {
      String address = addresses.isEmpty() ? null : addresses.get(next % addresses.size());
      SteleException error;
      try {
        if (address == null) {
          throw new SteleException(SteleException.NOT_READY, "tablet " + tabletId + " has no replicas yet; run it again in a moment");
        }
        if (stream == null) {
          open(address);
        }
        boolean more = waited(address);
        renew();
        if (!more) {
          return null;
        }
        var root = stream.getRoot();
        if (root.getRowCount() > 0) {
          ensureSameHistory(stream.getSchema().getCustomMetadata().getOrDefault("stele.incarnation", "0"));
          noteEnd(stream.getLatestMetadata(), root.getRowCount());
          return root;
        }
        continue; // a sign of life
      } catch (FlightRuntimeException e) {
        error = Cluster.errorOf(e, String.valueOf(address));
      } catch (SteleException e) {
        error = e;
      }
      closeStream();
      if (DEFINITE.contains(error.code)) {
        throw error;
      }
      if (!resumable) {
        throw new SteleException(error.code, error.said + "; nodes of an earlier release cannot resume a scan: run it again");
      }
      if (address != null) {
        said.put(address, error.said);
      }
      if (timeIsUp(error.code)) {
        throw givenUp(error);
      }
      next++;
      if (addresses.isEmpty() || next % addresses.size() == 0) {
        locateAgain();
      }
      Cluster.pause(backoffMs(error.code));
    }
  }

  private void open(String address) {
    int colon = address.lastIndexOf(':');
    var host = address.substring(0, colon).replaceAll("[\\[\\]]", "");
    try (var probe = new Socket()) { // gRPC alone would wait 20 s for a machine that is off
      probe.connect(new InetSocketAddress(host, Integer.parseInt(address.substring(colon + 1))), CONNECT_MS);
    } catch (IOException e) {
      throw new SteleException(SteleException.UNAVAILABLE, address + ": " + e.getMessage());
    }
    client = Cluster.client(allocator, address);
    stream = client.getStream(new Ticket(Cluster.encoded(ticket)));
  }

  /** Whether there is another batch. A server that sends nothing for long is given up. */
  private boolean waited(String address) {
    var here = stream;
    var silent = new boolean[1];
    var watch =
        WATCH.schedule(
            () -> {
              silent[0] = true;
              here.cancel("silent", null);
            },
            STALL_MS,
            TimeUnit.MILLISECONDS);
    try {
      return here.next();
    } catch (FlightRuntimeException e) {
      if (silent[0]) {
        throw new SteleException(SteleException.TIMED_OUT, address + " sent nothing for " + STALL_MS / 1000 + " s");
      }
      throw e;
    } finally {
      watch.cancel(false);
    }
  }

  /** Make the ticket ask for the rows after those that have just come. `lower`: the least key after them. */
  private void noteEnd(ArrowBuf lower, int rows) {
    if (lower == null || lower.readableBytes() == 0) {
      resumable = false;
      return;
    }
    var key = new byte[(int) lower.readableBytes()];
    lower.getBytes(lower.readerIndex(), key);
    var scan = (ObjectNode) ticket.get("scan");
    scan.put("lower", HexFormat.of().formatHex(key));
    if (scan.hasNonNull("limit")) {
      scan.put("limit", Math.max(0, scan.get("limit").asLong() - rows));
    }
  }

  /** A recovery after a lost majority may have given up rows that were given already. */
  private void ensureSameHistory(String told) {
    if (incarnation != null && !incarnation.equals(told)) {
      throw new SteleException(
          SteleException.SNAPSHOT_TOO_OLD,
          "tablet " + tabletId + " lost its majority and was recovered while it was scanned; scan again");
    }
    incarnation = told;
  }

  private void renew() {
    since = System.nanoTime();
    allowedMs = patienceMs;
    busyBackoffMs = BACKOFF_MS;
    busy = false;
    said.clear();
  }

  private boolean timeIsUp(int code) {
    long waitedMs = (System.nanoTime() - since) / 1_000_000;
    if (code == SteleException.THROTTLED) {
      busy = true;
      allowedMs = Math.min(waitedMs + patienceMs, BUSY_TIMES * patienceMs);
    }
    return waitedMs > allowedMs;
  }

  private long backoffMs(int code) {
    if (code != SteleException.THROTTLED) {
      return BACKOFF_MS;
    }
    busyBackoffMs = Math.min(2 * busyBackoffMs, BUSY_BACKOFF_MAX_MS);
    return (long) (busyBackoffMs * (0.5 + ThreadLocalRandom.current().nextDouble()));
  }

  private void locateAgain() {
    var now = locate.now(tabletId);
    if (now != null) {
      var fresh = Cluster.fieldsOf(now.ticket());
      if (fresh.has("incarnation") && !fresh.get("incarnation").equals(ticket.get("incarnation"))) {
        ticket.set("incarnation", fresh.get("incarnation")); // the tablet was recovered since
        ticket.remove("prepared"); // by another history
      }
      addresses = addressesOf(now);
    }
  }

  /**
   * The replicas in the order to ask them. If rows may be old: the nearest follower first, the leader last. If the snapshot is
   * prepared: the nearest first. Otherwise the leader first, because it has the rows earliest.
   */
  private List<String> addressesOf(Cluster.TabletPlace place) {
    var replicas = place.replicas();
    if (ticket.path("any_replica").asBoolean() && !replicas.isEmpty()) {
      replicas = new ArrayList<>(near.sorted(replicas.subList(1, replicas.size())));
      replicas.add(place.replicas().get(0));
    } else if (ticket.path("prepared").asLong() > 0) {
      replicas = near.sorted(replicas);
    }
    return replicas.stream().map(Cluster.Replica::address).toList();
  }

  private SteleException givenUp(SteleException last) {
    var reasons = said.isEmpty() ? last.said : String.join(", ", said.values());
    return new SteleException(
        busy ? SteleException.THROTTLED : last.code,
        "tablet " + tabletId + ": no replica could be read for " + allowedMs / 1000 + " s: " + reasons);
  }

  private void closeStream() {
    try {
      if (stream != null) {
        stream.cancel("not needed any more", null);
        stream.close();
      }
    } catch (Exception e) {
      // it has failed already
    } finally {
      stream = null;
    }
    try {
      if (client != null) {
        client.close();
      }
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
    } finally {
      client = null;
    }
  }

  @Override
  public void close() {
    closeStream();
    allocator.close();
  }
}
