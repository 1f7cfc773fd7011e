package dev.stele.spark;

import java.util.Map;
import org.apache.spark.sql.SQLContext;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.streaming.Source;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.sources.StreamSourceProvider;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Option;
import scala.Tuple2;
import scala.jdk.javaapi.CollectionConverters;

/**
 * `spark.read.format("stele")`, in place of the Python reader: the same name, options and answers. With
 * `spark.stele.reader=python`, or with an option of streams, it passes everything on to the Python source.
 */
public final class SteleSource implements TableProvider, DataSourceRegister, StreamSourceProvider {
  static final String NAME = "stele";
  private static final String READER = "spark.stele.reader";
  private static final int CHECK_PATIENCE_MS = 10_000;

  private StructType ofTable;
  private StructType found;
  private String id = "";
  private PythonDataSourceV2 python;

  @Override
  public String shortName() {
    return NAME;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap given) {
    if (isPython(given)) {
      return python.inferSchema(given);
    }
    try {
      var options = Options.parse(given);
      Options.ensureForRead(given);
      var plan = opened(options);
      ofTable = Types.spark(plan.schema());
      id = plan.about().path("table_id").asText();
      found = Types.chosen(options.columns(), ofTable);
      return found;
    } catch (SteleException e) {
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  /** Plans a scan, to check that the table can be read. If the options name a snapshot, also reads one row at it. */
  static Cluster.Plan opened(Options options) {
    var cluster = new Cluster(options.masters());
    var command = Cluster.command(options.table()).put("where", options.where());
    if (options.mayBeOld()) { // the node that plans refuses what the table's history cannot answer
      return cluster.plan(command.put("max_staleness_ms", options.maxStalenessMs()));
    }
    if (options.snapshot() == 0) {
      return cluster.plan(command);
    }
    var plan = cluster.plan(command.put("snapshot", options.snapshot()).put("limit", 1).put("resumable", true));
    if (!plan.tablets().isEmpty()) {
      try (var scan = new TabletScan(plan.tablets().get(0), Near.NOWHERE, id -> null, CHECK_PATIENCE_MS)) {
        scan.next();
      }
    }
    return plan;
  }

  /** If the user gives a schema, Spark does not ask for the table's; the table is asked at the first action. */
  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    if (isPython(properties)) {
      return python.getTable(schema, partitioning, properties);
    }
    return schema.equals(found)
        ? new SteleTable(properties, schema, ofTable, id)
        : new SteleTable(properties, schema, null, "");
  }

  /** Of `readStream`: Spark asks for it before it opens the table. Without an option of streams it would find no stream. */
  @Override
  public Tuple2<String, StructType> sourceSchema(
      SQLContext context, Option<StructType> schema, String provider, scala.collection.immutable.Map<String, String> given) {
    if (!Options.isStream(CollectionConverters.asJava(given))) {
      throw SteleException.refused("\"startingSnapshot\" is missing: for streams: table, earliest, latest, a hybrid time, or an "
          + "ISO 8601 time");
    }
    return Tuple2.apply(NAME, schema.getOrElse(StructType::new));
  }

  @Override
  public Source createSource(
      SQLContext context,
      String metadata,
      Option<StructType> schema,
      String provider,
      scala.collection.immutable.Map<String, String> given) {
    throw SteleException.refused("streams of stele need data source V2: remove " + SteleSource.class.getName()
        + " from spark.sql.streaming.disabledV2MicroBatchReaders");
  }

  private boolean isPython(Map<String, String> given) {
    var reader = SQLConf.get().getConfString(READER, "jvm");
    if (!reader.equals("jvm") && !reader.equals("python")) {
      throw SteleException.refused(READER + " is '" + reader + "': expected jvm or python");
    }
    if (python == null && (reader.equals("python") || Options.isStream(given))) {
      python = new PythonDataSourceV2();
      python.setShortName(NAME);
    }
    return python != null;
  }
}
