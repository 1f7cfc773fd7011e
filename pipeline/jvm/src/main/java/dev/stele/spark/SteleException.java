package dev.stele.spark;

import java.util.Map;
import org.apache.spark.QueryContext;
import org.apache.spark.sql.AnalysisException;
import scala.Option;
import scala.collection.immutable.Map$;

/** An error that a node or master reported, or that this reader found. It has no stack trace: the sentence says it all. */
public final class SteleException extends RuntimeException {
  /** Numbers of stele.model.errors. */
  static final int THROTTLED = 3;
  static final int NOT_READY = 4;
  static final int TIMED_OUT = 5;
  static final int UNAVAILABLE = 7;
  static final int UNKNOWN_OUTCOME = 8;
  static final int INVALID_ARGUMENT = 20;
  static final int NOT_FOUND = 21;
  static final int ALREADY_PRESENT = 22;
  static final int SCHEMA_MISMATCH = 29;
  static final int SNAPSHOT_TOO_OLD = 32;
  static final int INTERNAL = 60;

  private static final Map<Integer, String> NAMES =
      Map.ofEntries(
          Map.entry(1, "NOT_LEADER"),
          Map.entry(2, "NO_QUORUM"),
          Map.entry(3, "THROTTLED"),
          Map.entry(4, "NOT_READY"),
          Map.entry(5, "TIMED_OUT"),
          Map.entry(6, "STEPPING_DOWN"),
          Map.entry(7, "UNAVAILABLE"),
          Map.entry(8, "UNKNOWN_OUTCOME"),
          Map.entry(9, "SNAPSHOT_NOT_READY"),
          Map.entry(10, "DISK_FULL"),
          Map.entry(20, "INVALID_ARGUMENT"),
          Map.entry(21, "NOT_FOUND"),
          Map.entry(22, "ALREADY_PRESENT"),
          Map.entry(23, "CAS_FAILED"),
          Map.entry(24, "WRONG_CLUSTER"),
          Map.entry(25, "WRONG_NODE"),
          Map.entry(26, "STALE_EPOCH"),
          Map.entry(27, "STALE_INCARNATION"),
          Map.entry(28, "TOO_LARGE"),
          Map.entry(29, "SCHEMA_MISMATCH"),
          Map.entry(30, "TOO_OLD"),
          Map.entry(31, "DIGEST_MISMATCH"),
          Map.entry(32, "SNAPSHOT_TOO_OLD"),
          Map.entry(33, "CLOCK_AHEAD"),
          Map.entry(34, "UNSAFE_CHANGE"),
          Map.entry(35, "UNSUPPORTED_VERSION"),
          Map.entry(36, "TABLET_DELETED"),
          Map.entry(37, "PERMISSION_DENIED"),
          Map.entry(38, "CHANGE_IN_PROGRESS"),
          Map.entry(39, "VOLUME_OLD"),
          Map.entry(40, "CLOSED"),
          Map.entry(41, "CLOCK_BEHIND"),
          Map.entry(50, "CORRUPT"),
          Map.entry(51, "IO_ERROR"),
          Map.entry(60, "INTERNAL"));

  private static final long serialVersionUID = 1L;

  final int code;
  /** The message without the name of the code. */
  final String said;

  SteleException(int code, String said) {
    super(NAMES.getOrDefault(code, "INTERNAL") + ": " + said, null, false, false);
    this.code = code;
    this.said = said;
  }

  /** A statement that cannot be carried out, as the driver raises it. */
  static RuntimeException refused(String why) {
    return sneak(new SteleException(INVALID_ARGUMENT, why).inDriver());
  }

  /** What the driver raises, so that Python programs get an AnalysisException with one sentence. */
  AnalysisException inDriver() {
    Option<String> none = Option.empty();
    Option<Object> nowhere = Option.empty();
    Option<Throwable> cause = Option.empty();
    return new AnalysisException(
        getMessage(), nowhere, nowhere, cause, none, Map$.MODULE$.empty(), new QueryContext[0]);
  }

  /** Throws a checked exception where the signature has none. Spark's own code, in Scala, does the same. */
  @SuppressWarnings("unchecked")
  static <E extends Throwable> RuntimeException sneak(Throwable error) throws E {
    throw (E) error;
  }
}
