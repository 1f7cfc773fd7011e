package dev.stele.spark;

import com.fasterxml.jackson.core.json.JsonReadFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectReader;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import java.io.IOException;
import java.math.BigDecimal;
import java.time.DateTimeException;
import java.time.Instant;
import java.time.LocalDate;
import java.time.OffsetDateTime;
import java.time.temporal.ChronoUnit;
import java.util.Base64;
import java.util.regex.Pattern;
import org.apache.spark.sql.catalyst.CatalystTypeConverters;
import org.apache.spark.sql.catalyst.analysis.UnresolvedFunction;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.LeafExpression;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.parser.CatalystSqlParser$;
import org.apache.spark.sql.catalyst.util.ResolveDefaultColumns;
import org.apache.spark.sql.connector.catalog.ColumnDefaultValue;
import org.apache.spark.sql.connector.expressions.LiteralValue;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DatetimeType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.TimestampType;
import scala.jdk.javaapi.CollectionConverters;

/** Defaults of columns: SQL in Spark, JSON text in Stele (node/stele/model/column.py). Asks nobody. */
final class Defaults {
  private static final Object NONE = new Object();
  private static final ObjectReader READER = Cluster.JSON.reader().with(JsonReadFeature.ALLOW_NON_NUMERIC_NUMBERS);
  private static final Pattern QUOTED = Pattern.compile("(['\"])((?:\\\\.|(?!\\1).)*)\\1", Pattern.DOTALL);
  /** Spark reads 'today' and 'now' as the present, and a time without a date as one of today. */
  private static final Pattern FIXED_TIME =
      Pattern.compile("\\s*(?:[+-]?\\d(?!\\d?:)|epoch).*", Pattern.CASE_INSENSITIVE | Pattern.DOTALL);

  private Defaults() {}

  /**
   * The JSON text for a default in SQL; null if it is NULL. Only constants: nodes store one value for all later rows.
   * `statement`: "CREATE TABLE" or "ALTER TABLE", for Spark's messages.
   */
  static String json(String statement, String what, String column, DataType type, String sql) {
    var parsed = CatalystSqlParser$.MODULE$.parseExpression(sql);
    var value =
        isConstant(parsed) && !(namesPresent(sql) && (type instanceof DatetimeType || hasTime(parsed)))
            ? ResolveDefaultColumns.analyze(column, type, sql, statement).eval(null)
            : NONE;
    if (value == NONE || value instanceof Number number && !Double.isFinite(number.doubleValue())) {
      throw SteleException.refused(
          what + "the default of column " + column + " is " + sql + "; expected a constant, such as 0 or 'none'");
    }
    return value == null ? null : node(value, type).toString();
  }

  /** Functions are not constants, even if they need no row: `current_date()` is another value each day. */
  private static boolean isConstant(Expression parsed) {
    if (parsed instanceof LeafExpression) {
      return parsed instanceof Literal;
    }
    return !(parsed instanceof UnresolvedFunction) && CollectionConverters.asJava(parsed.children()).stream().allMatch(Defaults::isConstant);
  }

  private static boolean namesPresent(String sql) {
    return QUOTED.matcher(sql).results().anyMatch(text -> !FIXED_TIME.matcher(text.group(2)).matches());
  }

  private static boolean hasTime(Expression parsed) {
    return (parsed instanceof Literal || parsed instanceof Cast) && parsed.dataType() instanceof DatetimeType
        || CollectionConverters.asJava(parsed.children()).stream().anyMatch(Defaults::hasTime);
  }

  private static JsonNode node(Object value, DataType type) {
    var json = JsonNodeFactory.instance;
    if (value instanceof Boolean flag) {
      return json.booleanNode(flag);
    }
    if (value instanceof Double number) {
      return json.numberNode(number.doubleValue());
    }
    if (value instanceof Float number) {
      return json.numberNode(number.floatValue());
    }
    if (value instanceof byte[] bytes) {
      return json.textNode(Base64.getEncoder().encodeToString(bytes));
    }
    if (type instanceof DateType) {
      return json.textNode(LocalDate.ofEpochDay(((Number) value).longValue()).toString());
    }
    if (type instanceof TimestampType) {
      return json.textNode(Instant.EPOCH.plus(((Number) value).longValue(), ChronoUnit.MICROS).toString());
    }
    return value instanceof Number number && !(value instanceof Decimal)
        ? json.numberNode(number.longValue())
        : json.textNode(value.toString());
  }

  /**
   * The default of a table's column, by which Spark fills a column that an INSERT does not name. Null if it has none, or one
   * that this reader does not know: the table can be read without it.
   */
  static ColumnDefaultValue spark(DataType type, JsonNode text) {
    if (text.isNull() || text.isMissingNode()) {
      return null;
    }
    try {
      var json = READER.readTree(text.asText());
      if (json.isNull()) {
        return null;
      }
      var external = value(type, json);
      var value = CatalystTypeConverters.createToCatalystConverter(type).apply(external);
      return new ColumnDefaultValue(sql(type, value), new LiteralValue<>(value, type));
    } catch (IOException | DateTimeException | IllegalArgumentException e) {
      return null;
    }
  }

  private static Object value(DataType type, JsonNode json) throws IOException {
    if (type instanceof StringType) {
      return json.asText();
    }
    if (type instanceof BinaryType) {
      return json.binaryValue();
    }
    if (type instanceof DateType) {
      return LocalDate.parse(json.asText());
    }
    if (type instanceof TimestampType) {
      return OffsetDateTime.parse(json.asText()).toInstant();
    }
    if (type instanceof DecimalType) {
      return new BigDecimal(json.asText().strip().replace("_", "")); // as Python reads it
    }
    if (type instanceof DoubleType) {
      return json.doubleValue();
    }
    if (type instanceof FloatType) {
      return json.floatValue();
    }
    return json.isBoolean() ? (Object) json.booleanValue() : whole(type, json.longValue());
  }

  private static Object whole(DataType type, long number) {
    return switch (type.simpleString()) {
      case "tinyint" -> (byte) number;
      case "smallint" -> (short) number;
      case "int" -> (int) number;
      default -> number;
    };
  }

  /** Spark's own text for a value, but for times: it would write them in the session's time zone. */
  private static String sql(DataType type, Object value) {
    return type instanceof TimestampType
        ? "TIMESTAMP '" + Instant.EPOCH.plus((Long) value, ChronoUnit.MICROS) + "'"
        : new Literal(value, type).sql();
  }
}
