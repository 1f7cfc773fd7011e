package dev.stele.spark;

import java.util.Comparator;
import java.util.List;
import org.apache.spark.SparkEnv;

/** Where a task runs. It reads replicas on its own host first, then those in its zone. "": not known. */
record Near(String host, String zone) {
  static final Near NOWHERE = new Near("", "");
  private static final String ZONE = "STELE_ZONE";

  /** Where this process runs. `zone`: the option; if it is "", the variable STELE_ZONE. */
  static Near here(String zone) {
    var env = SparkEnv.get();
    var host = env == null ? "" : env.blockManager().blockManagerId().host();
    return new Near(host, zone.isEmpty() ? System.getenv().getOrDefault(ZONE, "") : zone);
  }

  /** The replicas, nearest first; equally near ones keep their order. */
  List<Cluster.Replica> sorted(List<Cluster.Replica> replicas) {
    return replicas.stream().sorted(Comparator.comparingInt(this::distance)).toList();
  }

  private int distance(Cluster.Replica replica) {
    if (replica.host().equals(host)) {
      return 0;
    }
    return !zone.isEmpty() && replica.zone().equals(zone) ? 1 : 2;
  }
}
