package dev.stele.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;

/** A table's columns as Spark's, and whether a schema that the user gave fits them (as stele_spark/types.py says it). */
final class Types {
  private static final Map<DataType, Integer> DIGITS =
      Map.of(DataTypes.ByteType, 3, DataTypes.ShortType, 5, DataTypes.IntegerType, 10, DataTypes.LongType, 20);
  private static final Map<DataType, List<DataType>> WIDER =
      Map.of(
          DataTypes.ByteType,
          List.of(
              DataTypes.ShortType,
              DataTypes.IntegerType,
              DataTypes.LongType,
              DataTypes.FloatType,
              DataTypes.DoubleType),
          DataTypes.ShortType,
          List.of(DataTypes.IntegerType, DataTypes.LongType, DataTypes.FloatType, DataTypes.DoubleType),
          DataTypes.IntegerType,
          List.of(DataTypes.LongType, DataTypes.DoubleType),
          DataTypes.FloatType,
          List.of(DataTypes.DoubleType));

  private Types() {}

  /** The table's schema. Each Stele type has exactly one Arrow type, and that exactly one Spark type. */
  static StructType spark(Schema arrow) {
    return ArrowUtils.fromArrowSchema(arrow);
  }

  /**
   * The table's columns by the names of a schema that the user gave, which may be in any case. Refuses a schema with other
   * columns than the table's, with types that do not hold all their values, or with NOT NULL where the table has nulls.
   */
  static Map<String, StructField> fitted(StructType asked, StructType table) {
    var faults = new ArrayList<String>();
    var found = new LinkedHashMap<String, StructField>();
    for (var field : asked.fields()) {
      var there = named(field.name(), found.values(), table, faults);
      if (there == null) {
        continue;
      }
      found.put(field.name(), there);
      if (!widens(there.dataType(), field.dataType())) {
        var types = there.dataType().simpleString() + " in the table, not " + field.dataType().simpleString();
        faults.add("'" + field.name() + "' is " + types);
      } else if (there.nullable() && !field.nullable()) {
        faults.add("'" + field.name() + "' may be null in the table; remove NOT NULL");
      }
    }
    refuse("schema", faults, table);
    return found;
  }

  /** Whether each value of one type is a value of the other, exactly. The same as in stele_spark/types.py. */
  private static boolean widens(DataType narrow, DataType wide) {
    if (narrow.equals(wide)) {
      return true;
    }
    if (wide instanceof DecimalType to) {
      int whole = to.precision() - to.scale();
      return narrow instanceof DecimalType of
          ? to.scale() >= of.scale() && whole >= of.precision() - of.scale()
          : whole >= DIGITS.getOrDefault(narrow, Integer.MAX_VALUE);
    }
    return WIDER.getOrDefault(narrow, List.of()).contains(wide);
  }

  /** The columns that the option `columns` names, in its order; the table's, if it names none. */
  static StructType chosen(List<String> columns, StructType table) {
    if (columns.isEmpty()) {
      return table;
    }
    var faults = new ArrayList<String>();
    var found = new ArrayList<StructField>();
    for (var name : columns) {
      var there = named(name, found, table, faults);
      if (there != null) {
        found.add(there);
      }
    }
    refuse("columns", faults, table);
    return new StructType(found.toArray(StructField[]::new));
  }

  /** The column of this name, in any case; a table has one at most. Else null, and a fault. */
  private static StructField named(
      String name, Collection<StructField> before, StructType table, List<String> faults) {
    var there = Arrays.stream(table.fields()).filter(f -> f.name().equalsIgnoreCase(name)).findFirst();
    if (there.isEmpty()) {
      faults.add("the table has no column '" + name + "'");
    } else if (before.contains(there.get())) {
      faults.add("'" + name + "' is given twice");
    }
    return there.orElse(null);
  }

  private static void refuse(String what, List<String> faults, StructType table) {
    if (!faults.isEmpty()) {
      throw new SteleException(
          SteleException.SCHEMA_MISMATCH,
          what + ": " + String.join("; ", faults) + "; the table has " + String.join(", ", names(table)));
    }
  }

  /** Stele's name for a type of Spark; Spark's own, if Stele has none, and masters refuse it. */
  static String named(DataType type) {
    return switch (type.simpleString()) {
      case "boolean" -> "bool";
      case "tinyint" -> "int8";
      case "smallint" -> "int16";
      case "int" -> "int32";
      case "bigint" -> "int64";
      default -> type.simpleString();
    };
  }

  static List<String> names(StructType schema) {
    return Arrays.stream(schema.fields()).map(StructField::name).collect(Collectors.toList());
  }
}
