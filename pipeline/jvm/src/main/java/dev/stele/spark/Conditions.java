package dev.stele.spark;

import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.LocalDate;
import java.util.Arrays;
import java.util.Base64;
import java.util.Map;
import java.util.Optional;
import java.util.stream.Collectors;
import org.apache.spark.sql.sources.And;
import org.apache.spark.sql.sources.EqualNullSafe;
import org.apache.spark.sql.sources.EqualTo;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.sources.GreaterThan;
import org.apache.spark.sql.sources.GreaterThanOrEqual;
import org.apache.spark.sql.sources.In;
import org.apache.spark.sql.sources.IsNotNull;
import org.apache.spark.sql.sources.IsNull;
import org.apache.spark.sql.sources.LessThan;
import org.apache.spark.sql.sources.LessThanOrEqual;
import org.apache.spark.sql.sources.Not;
import org.apache.spark.sql.types.StructField;

/**
 * Spark's filters as conditions of `where`, which the nodes evaluate. Spark does not check the rows again. So a filter is
 * passed on only if nodes and Spark agree on every row. They differ for NaN: in Spark it is greater than all numbers.
 */
final class Conditions {
  private static final int VALUES_MAX = 200;
  private static final LocalDate FIRST_DAY = LocalDate.of(1900, 1, 1); // before: calendars of Java and Spark differ
  private static final LocalDate LAST_DAY = LocalDate.of(9999, 12, 31);

  private final Map<String, StructField> columns;

  /** `columns`: the table's, by the names that Spark knows them by. */
  Conditions(Map<String, StructField> columns) {
    this.columns = columns;
  }

  /** The condition for a filter; empty if Spark must evaluate it. */
  Optional<String> of(Filter filter) {
    if (filter instanceof And both) {
      return of(both.left()).flatMap(left -> of(both.right()).map(right -> left + " AND " + right));
    }
    if (filter instanceof EqualTo f) {
      return compared(f.attribute(), "=", f.value());
    }
    if (filter instanceof EqualNullSafe f) {
      return compared(f.attribute(), "=", f.value());
    }
    if (filter instanceof LessThan f) {
      return compared(f.attribute(), "<", f.value());
    }
    if (filter instanceof LessThanOrEqual f) {
      return compared(f.attribute(), "<=", f.value());
    }
    if (filter instanceof GreaterThan f) {
      return isFloating(f.value()) ? Optional.empty() : compared(f.attribute(), ">", f.value());
    }
    if (filter instanceof GreaterThanOrEqual f) {
      return isFloating(f.value()) ? Optional.empty() : compared(f.attribute(), ">=", f.value());
    }
    if (filter instanceof Not not && not.child() instanceof EqualTo f) {
      return isFloating(f.value()) ? Optional.empty() : compared(f.attribute(), "!=", f.value());
    }
    if (filter instanceof IsNull f) {
      return column(f.attribute()).map(name -> name + " IS NULL");
    }
    if (filter instanceof IsNotNull f) {
      return column(f.attribute()).map(name -> name + " IS NOT NULL");
    }
    return filter instanceof In f ? in(f) : Optional.empty();
  }

  private Optional<String> in(In filter) {
    var values = filter.values();
    if (values.length == 0 || values.length > VALUES_MAX) {
      return Optional.empty();
    }
    var texts = Arrays.stream(values).map(v -> isFloating(v) ? null : text(v)).toList();
    if (texts.contains(null)) {
      return Optional.empty();
    }
    return column(filter.attribute())
        .map(name -> name + " IN (" + texts.stream().collect(Collectors.joining(", ")) + ")");
  }

  private Optional<String> compared(String attribute, String operator, Object value) {
    var text = text(value);
    return text == null ? Optional.empty() : column(attribute).map(name -> name + " " + operator + " " + text);
  }

  private Optional<String> column(String attribute) {
    return Optional.ofNullable(columns.get(attribute)).map(StructField::name);
  }

  private static boolean isFloating(Object value) {
    return value instanceof Double || value instanceof Float;
  }

  /** A value in the syntax of `where`; null if it cannot express the value exactly. */
  private static String text(Object value) {
    if (value instanceof Boolean || value instanceof Long || value instanceof Integer || value instanceof Short
        || value instanceof Byte) {
      return value.toString();
    }
    if (value instanceof Double || value instanceof Float) {
      double number = ((Number) value).doubleValue();
      return Double.isNaN(number) || Double.isInfinite(number) ? null : value.toString();
    }
    if (value instanceof BigDecimal decimal) {
      return decimal.toPlainString();
    }
    if (value instanceof String string) {
      return StandardCharsets.UTF_8.newEncoder().canEncode(string) ? quoted(string) : null;
    }
    if (value instanceof byte[] bytes) {
      return quoted(Base64.getEncoder().encodeToString(bytes));
    }
    if (value instanceof java.sql.Date date) {
      return day(date.toLocalDate());
    }
    if (value instanceof LocalDate date) {
      return day(date);
    }
    if (value instanceof java.sql.Timestamp moment) {
      return moment(moment.toInstant());
    }
    return value instanceof Instant moment ? moment(moment) : null;
  }

  private static String day(LocalDate date) {
    return date.isBefore(FIRST_DAY) || date.isAfter(LAST_DAY) ? null : quoted(date.toString());
  }

  private static String moment(Instant moment) {
    var day = moment.atZone(java.time.ZoneOffset.UTC).toLocalDate();
    return day(day) == null || moment.getNano() % 1_000 != 0 ? null : quoted(moment.toString());
  }

  private static String quoted(String text) {
    return "'" + text.replace("'", "''") + "'";
  }
}
