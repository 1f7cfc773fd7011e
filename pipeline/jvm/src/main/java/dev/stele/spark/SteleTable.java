package dev.stele.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.CatalogV2Util;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A table in one frame, view or query. Its reads are at one snapshot: that of its first plan, unless the options name one.
 * Its writes are those of the Python source, which is registered under the same name.
 */
class SteleTable implements SupportsRead, SupportsWrite {
  private final Map<String, String> raw;
  private final StructType schema;
  private final Column[] columns;
  private final Transform[] partitioning;
  private final Map<String, String> properties;
  private StructType ofTable;
  private String id;
  private long snapshot;

  /**
   * Of `load()`. `ofTable` and `id`: the table's own schema, and its id; null and "" if they are not known yet, as `schema` is what
   * the user gave.
   */
  SteleTable(Map<String, String> raw, StructType schema, StructType ofTable, String id) {
    this.raw = Map.copyOf(raw);
    this.schema = schema;
    this.ofTable = ofTable;
    this.id = id;
    columns = CatalogV2Util.structTypeToV2Columns(schema, false);
    partitioning = new Transform[0];
    properties = Map.of();
  }

  /** Of a catalog. `columns`: those of `schema`, the table's own, with their defaults. */
  SteleTable(
      Map<String, String> raw,
      StructType schema,
      String id,
      Column[] columns,
      Transform[] partitioning,
      Map<String, String> properties) {
    this.raw = Map.copyOf(raw);
    this.schema = schema;
    this.ofTable = schema;
    this.id = id;
    this.columns = columns;
    this.partitioning = partitioning;
    this.properties = properties;
  }

  /** This table, new and to be filled by one query. `drop` runs if the query fails. */
  StagedTable staged(Runnable drop) {
    return new Staged(this, drop);
  }

  private static final class Staged extends SteleTable implements StagedTable {
    private final Runnable drop;

    Staged(SteleTable of, Runnable drop) {
      super(of.raw, of.schema, of.id, of.columns, of.partitioning, of.properties);
      this.drop = drop;
    }

    /** CREATE OR REPLACE truncates what it has staged, and the table is empty. */
    @Override
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
      var appends = super.newWriteBuilder(info);
      return new SupportsTruncate() {
        @Override
        public WriteBuilder truncate() {
          return appends;
        }

        @Override
        public Write build() {
          return appends.build();
        }
      };
    }

    @Override
    public void commitStagedChanges() {} // the rows are where they belong

    @Override
    public void abortStagedChanges() {
      drop.run();
    }
  }

  @Override
  public String name() {
    return "stele " + new CaseInsensitiveStringMap(raw).getOrDefault("table", "");
  }

  @Override
  @SuppressWarnings("deprecation") // Spark asks for it, too
  public StructType schema() {
    return schema;
  }

  @Override
  public Column[] columns() {
    return columns;
  }

  @Override
  public Transform[] partitioning() {
    return partitioning;
  }

  @Override
  public Map<String, String> properties() {
    return properties;
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(
        TableCapability.BATCH_READ,
        TableCapability.BATCH_WRITE,
        TableCapability.STREAMING_WRITE,
        TableCapability.TRUNCATE);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap given) {
    try {
      var all = merged(given);
      Options.ensureForRead(all);
      var options = Options.parse(all);
      var cluster = new Cluster(options.masters());
      if (ofTable == null) {
        ofTable = Types.spark(same(cluster.plan(Cluster.command(options.table()))).schema());
      }
      var columns = Types.fitted(schema, ofTable);
      options.ensureChosen(columns.values().stream().map(StructField::name).toList(), ofTable);
      return new SteleScanBuilder(this, cluster, command(cluster, options), schema, columns, options);
    } catch (SteleException e) {
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  /** The plan, if it is of the table that was planned first. Another one of the same name has no rows at the frame's snapshot. */
  synchronized Cluster.Plan same(Cluster.Plan plan) {
    var found = plan.about().path("table_id").asText();
    if (id.isEmpty()) {
      id = found;
    } else if (!id.equals(found)) {
      throw new SteleException(
          SteleException.NOT_FOUND,
          "table " + new CaseInsensitiveStringMap(raw).getOrDefault("table", "")
              + " was deleted and created again since this frame was planned; load() it again");
    }
    return plan;
  }

  private ObjectNode command(Cluster cluster, Options options) {
    if (snapshot == 0) {
      snapshot = options.snapshot() != 0 ? options.snapshot() : options.mayBeOld() ? old(cluster, options) : now();
    }
    return Cluster.command(options.table())
        .put("snapshot", snapshot)
        .put("resumable", true)
        .put("statistics", true)
        .put("prepare", !options.mayBeOld()) // no leader has to make it ready: followers serve what they have
        .put("part_bytes", options.splitBytes());
  }

  private static long now() {
    return Options.hybridTime(Instant.now().truncatedTo(ChronoUnit.MICROS));
  }

  /** A snapshot of at most `maxStalenessMs` ago, as the masters choose it. All scans of the table are at this one. */
  private static long old(Cluster cluster, Options options) {
    var command = Cluster.command(options.table()).put("max_staleness_ms", options.maxStalenessMs());
    return cluster.plan(command).about().path("snapshot").asLong();
  }

  private Map<String, String> merged(CaseInsensitiveStringMap given) {
    var all = new HashMap<>(new CaseInsensitiveStringMap(raw));
    all.putAll(given);
    return all;
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    var python = new PythonDataSourceV2();
    python.setShortName(SteleSource.NAME);
    var options = new CaseInsensitiveStringMap(merged(info.options()));
    var table = python.getTable(info.schema(), new Transform[0], options);
    return ((SupportsWrite) table).newWriteBuilder(new Merged(info, options));
  }

  /** What is written, with the options of the table beside those of the write. */
  private record Merged(LogicalWriteInfo info, CaseInsensitiveStringMap options) implements LogicalWriteInfo {
    @Override
    public String queryId() {
      return info.queryId();
    }

    @Override
    public StructType schema() {
      return info.schema();
    }
  }
}
