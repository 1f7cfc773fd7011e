package dev.stele.spark;

import java.io.Serializable;
import java.math.BigDecimal;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.OffsetDateTime;
import java.time.ZoneOffset;
import java.time.format.DateTimeParseException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.spark.sql.types.StructType;

/**
 * The options of one read, checked. They are those of the Python reader (stele_spark/options.py), with the same refusals.
 * `snapshot`: a hybrid time; 0: the moment of the first action. `columns`: empty for all of them. `splitBytes`: of files
 * that one task reads, about. `zone`: where tasks run; "" if their environment says it. `maxStalenessMs`: how old rows may be;
 * -1: not at all.
 */
record Options(
    List<String> masters,
    String table,
    long snapshot,
    String where,
    List<String> columns,
    long splitBytes,
    String zone,
    long maxStalenessMs)
    implements Serializable {
  private static final Map<String, String> KNOWN = new LinkedHashMap<>();

  static {
    KNOWN.put("masters", "host:port of the masters, separated by commas");
    KNOWN.put("table", "the name of a table");
    KNOWN.put("columns", "for reads: the columns to read, separated by commas");
    KNOWN.put("where", "for reads: comparisons joined by AND");
    KNOWN.put("snapshot", "for reads: a hybrid time, or an ISO 8601 time");
    KNOWN.put("maxStaleness", "for reads: how many seconds old rows may be; followers serve them");
    KNOWN.put("splitBytes", "for reads and streams: about how many bytes of files a task reads");
    KNOWN.put("zone", "for reads and streams: where tasks run; replicas there are read first");
    KNOWN.put("op", "for writes: upsert, insert, insert_ignore, update, update_ignore, delete, delete_ignore");
    KNOWN.put("op_column", "for writes: a column of the frame that has the operation of each row");
    KNOWN.put("rejects", "for writes: a folder for refused rows, as Parquet");
    KNOWN.put("job", "for writes: a name; rows that another save() with this name has written count as done");
    KNOWN.put("startingSnapshot", "for streams: table, earliest, latest, a hybrid time, or an ISO 8601 time");
    KNOWN.put("maxRowsPerTrigger", "for streams: about how many changes a batch has at most");
    KNOWN.put("versions", "for streams: every change, or the newest one of each key in a batch");
    KNOWN.put("cursor", "for streams: the name of a hold that keeps history for this stream");
    KNOWN.put("cursorExpiresInS", "for streams: how many seconds the hold outlasts the stream");
    KNOWN.put("cursorMaxBytes", "for streams: how many bytes of old rows the hold may keep in each replica of a tablet");
  }

  private static final List<String> OF_READS =
      List.of("masters", "table", "columns", "where", "snapshot", "maxStaleness", "splitBytes", "zone");
  private static final long STALENESS_MAX_S = 315_360_000; // ten years, the longest history
  private static final long SPLIT_BYTES = 64L << 20;
  private static final long SPLIT_BYTES_MIN = 1L << 16;
  private static final long SPLIT_BYTES_MAX = 1L << 40;
  private static final List<String> OF_STREAMS =
      List.of("startingSnapshot", "maxRowsPerTrigger", "versions", "cursor", "cursorExpiresInS", "cursorMaxBytes");

  /** Whether an option is given that only streams have. */
  static boolean isStream(Map<String, String> raw) {
    return raw.keySet().stream().anyMatch(key -> isOf(OF_STREAMS, key));
  }

  private static boolean isOf(Collection<String> names, String key) {
    return names.stream().anyMatch(key::equalsIgnoreCase);
  }

  static Options parse(Map<String, String> raw) {
    var given = new LinkedHashMap<String, String>();
    raw.forEach((key, value) -> given.put(key.toLowerCase(Locale.ROOT), value));
    var faults = new ArrayList<String>();
    if (given.containsKey("provider")) { // CREATE TABLE; Spark would pass no options to readers of such a table
      faults.add("CREATE TABLE is not supported; use CREATE TEMPORARY VIEW ... USING stele OPTIONS (...)");
    } else if (given.containsKey("path") || given.containsKey("paths")) {
      faults.add("load() and save() take no path; name the table with option(\"table\", ...)");
    } else {
      var unknown = given.keySet().stream().filter(k -> !isOf(KNOWN.keySet(), k)).map(k -> '"' + k + '"').toList();
      if (!unknown.isEmpty()) {
        var there = KNOWN.entrySet().stream().map(e -> '"' + e.getKey() + "\" (" + e.getValue() + ")").toList();
        faults.add("unknown option " + String.join(", ", unknown) + "; options are " + String.join(", ", there));
      }
    }
    var masters = masters(given.getOrDefault("masters", ""));
    if (masters.isEmpty()) {
      faults.add("\"masters\" is missing: " + KNOWN.get("masters"));
    }
    if (given.getOrDefault("table", "").isEmpty()) {
      faults.add("\"table\" is missing: " + KNOWN.get("table"));
    }
    long snapshot = 0;
    var text = given.getOrDefault("snapshot", "0");
    try {
      snapshot = hybridTime(text);
    } catch (ArithmeticException e) {
      faults.add("\"snapshot\" is '" + text + "': " + e.getMessage());
    } catch (DateTimeParseException | NumberFormatException e) {
      faults.add("\"snapshot\" is '" + text + "': expected a hybrid time or an ISO 8601 time");
    }
    long maxStalenessMs = stalenessMs(given.get("maxstaleness"), faults);
    if (maxStalenessMs >= 0 && snapshot != 0) {
      faults.add("\"snapshot\" and \"maxStaleness\" are both given: give one of them");
    }
    var columns = List.<String>of();
    if (given.containsKey("columns")) {
      columns = Arrays.stream(given.get("columns").split(",", -1)).map(String::trim).toList();
      if (columns.contains("")) {
        faults.add("\"columns\" is '" + given.get("columns") + "': expected names of columns, separated by commas");
      }
    }
    long splitBytes = whole(given, "splitBytes", SPLIT_BYTES, SPLIT_BYTES_MIN, SPLIT_BYTES_MAX, faults);
    refuse(faults);
    var where = given.getOrDefault("where", "");
    return new Options(
        masters,
        given.get("table"),
        snapshot,
        where,
        columns,
        splitBytes,
        given.getOrDefault("zone", ""),
        maxStalenessMs);
  }

  boolean mayBeOld() {
    return maxStalenessMs >= 0;
  }

  private static long stalenessMs(String text, List<String> faults) {
    if (text == null) {
      return -1;
    }
    if (text.matches("[0-9]{1,9}(\\.[0-9]{1,3})?")) {
      var seconds = new BigDecimal(text);
      if (seconds.compareTo(BigDecimal.valueOf(STALENESS_MAX_S)) <= 0) {
        return seconds.movePointRight(3).longValueExact();
      }
    }
    faults.add(
        "\"maxStaleness\" is '" + text + "': expected seconds from 0 to " + STALENESS_MAX_S + ", such as 5 or 0.5");
    return -1;
  }

  private static long whole(
      Map<String, String> given, String name, long otherwise, long least, long most, List<String> faults) {
    var text = given.getOrDefault(name.toLowerCase(Locale.ROOT), "");
    if (text.isEmpty()) {
      return otherwise;
    }
    if (text.matches("[0-9]{1,18}") && Long.parseLong(text) >= least && Long.parseLong(text) <= most) {
      return Long.parseLong(text);
    }
    faults.add('"' + name + "\" is '" + text + "': expected a whole number from " + least + " to " + most);
    return otherwise;
  }

  /** Refuses options of a write or a stream where rows are read. */
  static void ensureForRead(Map<String, String> raw) {
    var faults = new ArrayList<String>();
    for (var option : KNOWN.keySet()) {
      if (isOf(raw.keySet(), option) && !OF_READS.contains(option)) {
        var use = OF_STREAMS.contains(option) ? "stream" : "write";
        faults.add('"' + option + "\" is an option of a " + use + ", not of a read");
      }
    }
    refuse(faults);
  }

  static List<String> masters(String text) {
    return Arrays.stream(text.split(",")).map(String::trim).filter(part -> !part.isEmpty()).toList();
  }

  private static final long HYBRID_SECONDS_MAX = (1L << 51) / 1_000_000; // in 2041; then the counter's bits and the sign follow

  private static long hybridTime(String text) {
    if (!text.isEmpty() && text.chars().allMatch(c -> c >= '0' && c <= '9')) {
      return Long.parseLong(text);
    }
    var iso = text.replaceFirst("^(\\d{4}-\\d{2}-\\d{2}) ", "$1T");
    if (iso.length() == 10) {
      return hybridTime(LocalDate.parse(iso).atStartOfDay().toInstant(ZoneOffset.UTC));
    }
    try {
      return hybridTime(OffsetDateTime.parse(iso).toInstant());
    } catch (DateTimeParseException e) {
      return hybridTime(LocalDateTime.parse(iso).toInstant(ZoneOffset.UTC)); // without a zone it is UTC
    }
  }

  /** Microseconds since 1970, and 12 bits of a counter, the hybrid time of stele.model.clock. */
  static long hybridTime(Instant moment) {
    if (moment.getEpochSecond() < 0 || moment.getNano() % 1_000 != 0) {
      throw new ArithmeticException("expected a hybrid time or an ISO 8601 time, not before 1970 and not finer than a microsecond");
    }
    if (moment.getEpochSecond() >= HYBRID_SECONDS_MAX) {
      throw new ArithmeticException("it lies in the future");
    }
    long micros = Math.addExact(Math.multiplyExact(moment.getEpochSecond(), 1_000_000L), moment.getNano() / 1_000);
    return Math.multiplyExact(micros, 1L << 12);
  }

  /** Refuses a read whose schema names other columns than the option `columns`. */
  void ensureChosen(Collection<String> ofSchema, StructType table) {
    var chosen = Types.names(Types.chosen(columns, table));
    if (!columns.isEmpty() && !chosen.equals(List.copyOf(ofSchema))) {
      refuse(
          List.of(
              "\"columns\" names " + String.join(", ", chosen) + ", but .schema(...) names "
                  + String.join(", ", ofSchema) + "; give one of them"));
    }
  }

  private static void refuse(List<String> faults) {
    if (!faults.isEmpty()) {
      throw new SteleException(SteleException.INVALID_ARGUMENT, "data source stele: " + String.join("; ", faults));
    }
  }
}
