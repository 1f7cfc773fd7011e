package dev.stele.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.function.Function;
import java.util.stream.StreamSupport;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableCatalogCapability;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableInfo;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A cluster's tables by name in SQL: `spark.sql.catalog.NAME=dev.stele.spark.SteleCatalog` and
 * `spark.sql.catalog.NAME.masters=HOST:PORT,...`. There are no namespaces. Each query reads the present, unless it says when.
 *
 * <p>A table is never replaced. Spark would drop a table of a mere TableCatalog before it makes the new one, so this is a
 * StagingTableCatalog, which is asked first.
 */
public final class SteleCatalog implements StagingTableCatalog {
  private static final Set<String> PROPERTIES = new TreeSet<>(Set.of("primary_key", "replication_factor", Alteration.HISTORY, TableCatalog.PROP_COMMENT));
  private static final Set<String> OF_SPARK = Set.of("owner", "provider", "is_managed_location", "external");
  private static final String OPTION = TableCatalog.OPTION_PREFIX;

  private String name;
  private String masters;

  @Override
  public void initialize(String catalog, CaseInsensitiveStringMap options) {
    name = catalog;
    masters = options.getOrDefault("masters", "");
    if (Options.masters(masters).isEmpty()) {
      throw SteleException.refused("catalog " + catalog + ": spark.sql.catalog." + catalog + ".masters is missing: HOST:PORT of the masters, "
          + "separated by commas");
    }
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public String[] defaultNamespace() {
    return new String[0];
  }

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length > 0) {
      throw new NoSuchNamespaceException(namespace);
    }
    try {
      var tables = cluster().act("list-tables", Cluster.JSON.createObjectNode()).path("tables");
      return StreamSupport.stream(tables.spliterator(), false)
          .map(table -> Identifier.of(new String[0], table.asText()))
          .toArray(Identifier[]::new);
    } catch (SteleException e) {
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  @Override
  public Table loadTable(Identifier ident) throws NoSuchTableException {
    return table(ident, Map.of());
  }

  /** VERSION AS OF: a hybrid time, as `client.now()` returns it. */
  @Override
  public Table loadTable(Identifier ident, String version) throws NoSuchTableException {
    return table(ident, Map.of("snapshot", version));
  }

  /** TIMESTAMP AS OF: microseconds since 1970. */
  @Override
  public Table loadTable(Identifier ident, long timestamp) throws NoSuchTableException {
    if (timestamp <= 0) {
      throw SteleException.refused("TIMESTAMP AS OF: the time is before 1970");
    }
    return table(ident, Map.of("snapshot", String.valueOf(timestamp << 12)));
  }

  private SteleTable table(Identifier ident, Map<String, String> more) throws NoSuchTableException {
    if (ident.namespace().length > 0) {
      throw new NoSuchTableException(ident);
    }
    var options = new HashMap<>(more);
    options.put("masters", masters);
    options.put("table", ident.name());
    try {
      var plan = SteleSource.opened(Options.parse(options));
      var about = plan.about();
      var properties = new LinkedHashMap<String, String>();
      properties.put("primary_key", texts(about.path("key")));
      properties.put("replication_factor", about.path("replication_factor").asText());
      properties.put(Alteration.HISTORY, about.path(Alteration.HISTORY).asText());
      for (var note : List.of(TableCatalog.PROP_OWNER, TableCatalog.PROP_COMMENT)) {
        if (!about.path(note).asText("").isEmpty()) {
          properties.put(note, about.path(note).asText());
        }
      }
      var partitioning = new ArrayList<Transform>();
      for (var part : about.path("partitioning")) {
        var columns = columns(part.path("columns"));
        if (part.path("kind").asText().equals("hash")) {
          partitioning.add(Expressions.bucket(part.path("buckets").asInt(), columns.toArray(String[]::new)));
        } else {
          properties.put("range_columns", String.join(", ", columns));
        }
      }
      var schema = Types.spark(plan.schema());
      var columns = withDefaults(schema, about.path("columns"));
      return new SteleTable(options, schema, about.path("table_id").asText(), columns, partitioning.toArray(Transform[]::new), properties);
    } catch (SteleException e) {
      if (e.code == SteleException.NOT_FOUND) {
        throw new NoSuchTableException(ident);
      }
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  /** The table can be recalled for a time, as after `stele table drop`. */
  @Override
  public boolean dropTable(Identifier ident) {
    if (ident.namespace().length > 0) {
      return false;
    }
    try {
      var about = cluster().plan(Cluster.command(ident.name())).about();
      return drop(ident.name(), about.path("table_id").asText());
    } catch (SteleException e) {
      if (e.code == SteleException.NOT_FOUND) {
        return false;
      }
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  /** Drops this table only, not another one that has its name by now. False if it is gone. */
  private boolean drop(String table, String id) {
    try {
      cluster().change("drop-table", Cluster.command(table).put("table_id", id).put("drop_id", Cluster.newId()));
      return true;
    } catch (SteleException e) {
      if (e.code == SteleException.NOT_FOUND) {
        return false;
      }
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  /** Without it Spark refuses DEFAULT. */
  @Override
  public Set<TableCatalogCapability> capabilities() {
    return EnumSet.of(TableCatalogCapability.SUPPORT_COLUMN_DEFAULT_VALUE);
  }

  /**
   * With TBLPROPERTIES ('primary_key'='id, ...'), and if wanted 'replication_factor', 'history_s' and PARTITIONED BY
   * (bucket(8, id)).
   */
  @Override
  @SuppressWarnings("deprecation") // Spark calls it for the newer one
  public Table createTable(Identifier ident, Column[] given, Transform[] parts, Map<String, String> properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    return create(ident, Cluster.newId(), given, parts, properties);
  }

  private SteleTable create(Identifier ident, String id, Column[] given, Transform[] parts, Map<String, String> properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    if (ident.namespace().length > 0) {
      throw new NoSuchNamespaceException(ident.namespace());
    }
    try {
      cluster().change("create-table", created(ident.name(), given, parts, properties).put("table_id", id));
      return table(ident, Map.of());
    } catch (SteleException e) {
      if (e.code == SteleException.ALREADY_PRESENT) {
        throw new TableAlreadyExistsException(ident);
      }
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    } catch (NoSuchTableException e) {
      throw SteleException.refused("table " + ident.name() + " was created, but somebody has dropped it since; run the statement again");
    }
  }

  /** Of CREATE TABLE ... AS SELECT. The table is there at once, and is dropped if its rows cannot be written. */
  @Override
  public StagedTable stageCreate(Identifier ident, TableInfo info) throws TableAlreadyExistsException, NoSuchNamespaceException {
    var id = Cluster.newId();
    return create(ident, id, info.columns(), info.partitions(), info.properties()).staged(() -> drop(ident.name(), id));
  }

  @Override
  public StagedTable stageReplace(Identifier ident, TableInfo info) {
    throw notReplaced("REPLACE TABLE", ident);
  }

  /** Of CREATE OR REPLACE TABLE, createOrReplace() and saveAsTable() with mode overwrite: creates the table if there is none. */
  @Override
  public StagedTable stageCreateOrReplace(Identifier ident, TableInfo info) throws NoSuchNamespaceException {
    try {
      if (!tableExists(ident)) {
        return stageCreate(ident, info);
      }
    } catch (TableAlreadyExistsException e) { // made by somebody just now
    }
    throw notReplaced("CREATE OR REPLACE TABLE", ident);
  }

  private static RuntimeException notReplaced(String what, Identifier ident) {
    return SteleException.refused(what + " " + ident.name() + ": the table exists, and tables are not replaced; its rows are as "
        + "they were. DROP TABLE it first, or write to it with INSERT INTO or mode \"append\"");
  }

  private static ObjectNode created(String table, Column[] given, Transform[] parts, Map<String, String> properties) {
    var what = "CREATE TABLE " + table + ": ";
    for (var property : properties.keySet()) {
      if (!PROPERTIES.contains(property) && !OF_SPARK.contains(property)) {
        throw SteleException.refused(what + unknown(property, properties));
      }
    }
    if (!properties.containsKey("primary_key")) {
      throw SteleException.refused(what + "name the key: TBLPROPERTIES ('primary_key'='id, ...'), or "
          + "writeTo(...).tableProperty(\"primary_key\", \"id, ...\"); saveAsTable cannot");
    }
    var provider = properties.getOrDefault(TableCatalog.PROP_PROVIDER, SteleSource.NAME);
    if (!provider.equalsIgnoreCase(SteleSource.NAME)) {
      throw SteleException.refused(what + "tables of this catalog are tables of Stele: leave out USING " + provider
          + ", or, with saveAsTable, say format(\"stele\")");
    }
    var key = Arrays.stream(properties.get("primary_key").split(",")).map(String::trim).toList();
    var body = Cluster.command(table);
    var columns = body.putArray("columns");
    for (var each : given) {
      if (each.comment() != null) {
        throw SteleException.refused(what + Alteration.noComment(each.name()));
      }
      var nullable = each.nullable() && !key.contains(each.name());
      var column = columns.addArray().add(each.name()).add(Types.named(each.dataType())).add(nullable);
      if (each.defaultValue() != null) {
        column.add(Defaults.json("CREATE TABLE", what, each.name(), each.dataType(), each.defaultValue().getSql()));
      }
    }
    var names = body.putArray("key");
    key.forEach(names::add);
    var hashes = body.putArray("hash");
    for (var part : parts) {
      if (!part.name().equals("bucket") || !(part.arguments()[0] instanceof Literal<?> buckets)) {
        throw SteleException.refused(what + "PARTITIONED BY takes bucket(NUMBER, COLUMN, ...) only");
      }
      var hash = hashes.addObject().put("buckets", ((Number) buckets.value()).intValue());
      var of = hash.putArray("columns");
      for (var reference : part.references()) {
        of.add(String.join(".", reference.fieldNames()));
      }
    }
    if (properties.containsKey(TableCatalog.PROP_COMMENT)) {
      body.put("comment", properties.get(TableCatalog.PROP_COMMENT));
    }
    if (properties.containsKey(Alteration.HISTORY)) {
      body.put(Alteration.HISTORY, Alteration.seconds(what, properties.get(Alteration.HISTORY)));
    }
    if (properties.containsKey("replication_factor")) {
      try {
        body.put("replication_factor", Integer.parseInt(properties.get("replication_factor")));
      } catch (NumberFormatException e) {
        throw SteleException.refused(what + "replication_factor must be 1, 3, 5 or 7");
      }
    }
    return body;
  }

  /** Spark gives each option of OPTIONS twice: by its name, and with a prefix. */
  private static String unknown(String property, Map<String, String> properties) {
    if (property.equals(TableCatalog.PROP_LOCATION)) {
      return "nodes keep the table's rows; leave out LOCATION";
    }
    if (property.startsWith(OPTION) || properties.containsKey(OPTION + property)) {
      return "tables of this catalog take no options; leave out option '"
          + (property.startsWith(OPTION) ? property.substring(OPTION.length()) : property) + "'";
    }
    return "there is no property '" + property + "'; expected " + String.join(", ", PROPERTIES);
  }

  /** Columns and their defaults, the table's comment and history. All changes of one statement are made, or none. */
  @Override
  public Table alterTable(Identifier ident, TableChange... changes) throws NoSuchTableException {
    if (changes.length > 0) { // DROP COLUMN IF EXISTS may change nothing
      alter(ident, plan -> Alteration.of(ident.name(), Types.spark(plan.schema()), changes));
    }
    return loadTable(ident);
  }

  @Override
  public void renameTable(Identifier from, Identifier to) throws NoSuchTableException, TableAlreadyExistsException {
    if (to.namespace().length > 0) {
      throw SteleException.refused("ALTER TABLE " + from.name() + " RENAME TO " + to + ": leave out the catalog's name: RENAME TO " + to.name());
    }
    try {
      alter(from, plan -> Cluster.command(from.name()).put("rename_to", to.name()));
    } catch (SteleException e) {
      if (e.code == SteleException.ALREADY_PRESENT) {
        throw new TableAlreadyExistsException(to);
      }
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  /** Have the masters make a change. It has an id, so that a repeated call makes it once. */
  private void alter(Identifier ident, Function<Cluster.Plan, ObjectNode> change) throws NoSuchTableException {
    if (ident.namespace().length > 0) {
      throw new NoSuchTableException(ident);
    }
    var cluster = cluster();
    try {
      var plan = cluster.plan(Cluster.command(ident.name()));
      var body = change.apply(plan);
      body.put("table_id", plan.about().path("table_id").asText());
      cluster.change("alter-table", body.put("alter_id", Cluster.newId()));
    } catch (SteleException e) {
      if (e.code == SteleException.NOT_FOUND) {
        throw new NoSuchTableException(ident);
      }
      if (e.code == SteleException.ALREADY_PRESENT) {
        throw e;
      }
      throw SteleException.<RuntimeException>sneak(e.inDriver());
    }
  }

  private Cluster cluster() {
    return new Cluster(Options.masters(masters));
  }

  /** `told`: [NAME, TYPE, NULLABLE, DEFAULT] of each column, in the order of the schema. */
  private static Column[] withDefaults(StructType schema, JsonNode told) {
    var columns = new ArrayList<Column>();
    for (var field : schema.fields()) {
      var fallback = Defaults.spark(field.dataType(), told.path(columns.size()).path(3));
      var column = Column.builderFor(field.name(), field.dataType()).nullable(field.nullable());
      columns.add(column.defaultValue(fallback).build());
    }
    return columns.toArray(Column[]::new);
  }

  private static List<String> columns(JsonNode names) {
    return StreamSupport.stream(names.spliterator(), false).map(n -> n.asText()).toList();
  }

  private static String texts(JsonNode names) {
    return String.join(", ", columns(names));
  }
}
