package dev.stele.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.Serializable;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * One scan: planned once, by the masters; one partition for each ticket, of about 64 MiB of a tablet. `counted`: only the
 * number of rows is read.
 */
final class SteleScan implements Scan, Batch, SupportsReportStatistics {
  private static final int ROW_OVERHEAD_BYTES = 8;

  private final SteleTable table;
  private final Cluster cluster;
  private final ObjectNode command;
  private final StructType schema;
  private final Map<String, StructField> columns;
  private final boolean counted;
  private final String zone;
  private final boolean mayBeOld;
  private Cluster.Plan plan;

  /**
   * `columns`: those of `table`, by the names of `schema`. `zone`: where tasks run; "" if their environment says it. `mayBeOld`:
   * followers are read before leaders.
   */
  SteleScan(
      SteleTable table,
      Cluster cluster,
      ObjectNode command,
      StructType schema,
      Map<String, StructField> columns,
      boolean counted,
      String zone,
      boolean mayBeOld) {
    this.table = table;
    this.zone = zone;
    this.mayBeOld = mayBeOld;
    this.cluster = cluster;
    this.command = command;
    this.schema = schema;
    this.columns = columns;
    this.counted = counted;
  }

  @Override
  public StructType readSchema() {
    return counted ? new StructType().add("count", DataTypes.LongType, false) : schema;
  }

  @Override
  public String description() {
    return "stele " + command.path("table").asText() + " " + command.path("where").asText()
        + (command.has("limit") ? " limit " + command.get("limit") : "") + (counted ? " counted" : "");
  }

  @Override
  public Batch toBatch() {
    return this;
  }

  private synchronized Cluster.Plan plan() {
    if (plan == null) {
      try {
        var names = command.putArray("columns");
        (counted ? List.<String>of() : Types.names(schema)).forEach(name -> names.add(columns.get(name).name()));
        if (names.isEmpty()) { // only the number of rows is asked for, so one column is enough: the first of the key
          var about = cluster.plan(Cluster.command(command.path("table").asText())).about();
          names.add(about.path("key").path(0).asText());
        }
        plan = table.same(cluster.plan(command));
      } catch (SteleException e) {
        throw SteleException.<RuntimeException>sneak(e.inDriver());
      }
    }
    return plan;
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return plan().tablets().stream().map(Partition::new).toArray(InputPartition[]::new);
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new Factory(cluster, command.toString(), schema, counted, zone, mayBeOld);
  }

  /** Estimates for the whole table. Conditions and limits make them smaller, by a factor that nobody knows. */
  @Override
  public Statistics estimateStatistics() {
    long rows = plan().rows();
    return new Statistics() {
      @Override
      public OptionalLong sizeInBytes() {
        return rows < 0 ? OptionalLong.empty() : OptionalLong.of(Math.max(1, rows * (ROW_OVERHEAD_BYTES + readSchema().defaultSize())));
      }

      @Override
      public OptionalLong numRows() {
        return rows < 0 ? OptionalLong.empty() : OptionalLong.of(rows);
      }
    };
  }

  /** A tablet, or a part of it. */
  private record Partition(Cluster.TabletPlace place) implements InputPartition {
    /** Hosts where a replica is; Spark runs the task there if it has an executor there. */
    @Override
    public String[] preferredLocations() {
      return place.replicas().stream().map(Cluster.Replica::host).toArray(String[]::new);
    }
  }

  /** Made in the driver, used in tasks. `command` is JSON text, with which a task finds replicas that have moved. */
  private record Factory(
      Cluster cluster, String command, StructType schema, boolean counted, String zone, boolean mayBeOld)
      implements PartitionReaderFactory {
    @Override
    public boolean supportColumnarReads(InputPartition partition) {
      return !counted;
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new Counting(scan(partition));
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
      return new Columnar(scan(partition), schema);
    }

    private TabletScan scan(InputPartition partition) {
      var place = ((Partition) partition).place();
      return new TabletScan(mayBeOld ? place.ofAnyReplica() : place, Near.here(zone), new Located(cluster, command));
    }
  }

  /** Finds a tablet's replicas anew. */
  private record Located(Cluster cluster, String command) implements TabletScan.Locate, Serializable {
    @Override
    public Cluster.TabletPlace now(String tabletId) {
      var table = fields().path("table").asText();
      // Ask only where replicas are. The ticket already has its keys and its snapshot.
      var asked = fields().put("statistics", false).put("prepare", false).put("part_bytes", 0);
      try {
        for (var place : cluster.plan(asked).tablets()) {
          if (place.tabletId().equals(tabletId)) {
            return place;
          }
        }
      } catch (SteleException e) {
        if (e.code == SteleException.NOT_FOUND) {
          throw e;
        }
        return null; // the masters may be away; the known nodes are tried again
      }
      throw new SteleException(
          SteleException.NOT_FOUND,
          "table " + table + " was deleted and created again since this frame was planned, or its range was dropped; "
              + "load() it again");
    }

    private ObjectNode fields() {
      try {
        return (ObjectNode) Cluster.JSON.readTree(command);
      } catch (java.io.IOException e) {
        throw new IllegalStateException(e);
      }
    }
  }

  /** Batches of rows, in the types of `schema`, without copying a value. */
  private static final class Columnar implements PartitionReader<ColumnarBatch> {
    private final TabletScan scan;
    private final StructType schema;
    private ColumnarBatch batch;

    Columnar(TabletScan scan, StructType schema) {
      this.scan = scan;
      this.schema = schema;
    }

    @Override
    public boolean next() {
      var root = scan.next();
      if (root == null) {
        return false;
      }
      var columns = new ColumnVector[schema.length()];
      for (int i = 0; i < columns.length; i++) {
        var column = new ArrowColumnVector(root.getVector(i));
        var wanted = schema.apply(i).dataType();
        columns[i] = column.dataType().equals(wanted) ? column : new Widened(column, wanted);
      }
      batch = new ColumnarBatch(columns, root.getRowCount());
      return true;
    }

    @Override
    public ColumnarBatch get() {
      return batch;
    }

    @Override
    public void close() {
      scan.close();
    }
  }

  /** One row: how many rows the tablet has. */
  private static final class Counting implements PartitionReader<InternalRow> {
    private final TabletScan scan;
    private boolean done;

    Counting(TabletScan scan) {
      this.scan = scan;
    }

    @Override
    public boolean next() {
      return !done;
    }

    @Override
    public InternalRow get() {
      long rows = 0;
      for (var root = scan.next(); root != null; root = scan.next()) {
        rows += root.getRowCount();
      }
      done = true;
      return new GenericInternalRow(new Object[] {rows});
    }

    @Override
    public void close() {
      scan.close();
    }
  }
}
