package dev.stele.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownFilters;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Takes what Spark pushes down: columns, filters that nodes understand, a limit, and `count(*)`. */
final class SteleScanBuilder
    implements ScanBuilder,
        SupportsPushDownRequiredColumns,
        SupportsPushDownFilters,
        SupportsPushDownLimit,
        SupportsPushDownAggregates {
  private static final int WHERE_CHARS_MAX = 32_000;

  private final SteleTable table;
  private final Cluster cluster;
  private final ObjectNode command;
  private final Map<String, StructField> columns;
  private final List<Filter> pushed = new ArrayList<>();
  private StructType schema;
  private final String zone;
  private final boolean mayBeOld;
  private String where;
  private boolean counted;

  /** `columns`: those of `table`, by the names of `schema`. The conditions of `options` are checked by the nodes. */
  SteleScanBuilder(
      SteleTable table,
      Cluster cluster,
      ObjectNode command,
      StructType schema,
      Map<String, StructField> columns,
      Options options) {
    this.table = table;
    this.cluster = cluster;
    this.command = command;
    this.schema = schema;
    this.columns = columns;
    this.where = options.where();
    this.zone = options.zone();
    this.mayBeOld = options.mayBeOld();
  }

  @Override
  public void pruneColumns(StructType required) {
    schema = required;
  }

  @Override
  public Filter[] pushFilters(Filter[] filters) {
    var left = new ArrayList<Filter>();
    var conditions = new Conditions(comparable());
    for (var filter : filters) {
      var condition = conditions.of(filter);
      if (condition.isEmpty() || where.length() + condition.get().length() > WHERE_CHARS_MAX) {
        left.add(filter);
      } else {
        where = where.isEmpty() ? condition.get() : where + " AND " + condition.get();
        pushed.add(filter);
      }
    }
    return left.toArray(Filter[]::new);
  }

  /** The columns that are read in the table's own type. With a wider type a filter may have values that nodes refuse. */
  private Map<String, StructField> comparable() {
    var found = new LinkedHashMap<>(columns);
    found.entrySet().removeIf(e -> !schema.apply(e.getKey()).dataType().equals(e.getValue().dataType()));
    return found;
  }

  @Override
  public Filter[] pushedFilters() {
    return pushed.toArray(Filter[]::new);
  }

  /** Each tablet gives this many rows at most; Spark takes the first of all. */
  @Override
  public boolean pushLimit(int limit) {
    command.put("limit", limit);
    return true;
  }

  @Override
  public boolean isPartiallyPushed() {
    return true;
  }

  /** Spark asks only where it has no filter left to evaluate. Each task gives its count, and Spark adds them up. */
  @Override
  public boolean pushAggregation(Aggregation aggregation) {
    var functions = aggregation.aggregateExpressions();
    counted = aggregation.groupByExpressions().length == 0 && functions.length == 1 && functions[0] instanceof CountStar;
    return counted;
  }

  @Override
  public Scan build() {
    command.put("where", where);
    return new SteleScan(table, cluster, command, schema, columns, counted, zone, mayBeOld);
  }
}
