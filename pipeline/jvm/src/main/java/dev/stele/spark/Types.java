package dev.stele.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;

/** A table's columns as Spark's, and whether a schema that the user gave fits them (as stele_spark/types.py says it). */
final class Types {
  private Types() {}

  /** The table's schema. Each Stele type has exactly one Arrow type, and that exactly one Spark type. */
  static StructType spark(Schema arrow) {
    return ArrowUtils.fromArrowSchema(arrow);
  }

  /** Refuses a schema with other columns or types than the table's, or with NOT NULL where the table has nulls. */
  static void check(StructType asked, StructType table) {
    var have = new LinkedHashMap<String, StructField>();
    for (var field : table.fields()) {
      have.put(field.name(), field);
    }
    var faults = new ArrayList<String>();
    var names = Arrays.asList(asked.fieldNames());
    names.stream()
        .distinct()
        .filter(name -> names.indexOf(name) != names.lastIndexOf(name))
        .forEach(name -> faults.add("'" + name + "' is given twice"));
    for (var field : asked.fields()) {
      var there = have.get(field.name());
      if (there == null) {
        faults.add("the table has no column '" + field.name() + "'");
      } else if (!there.dataType().equals(field.dataType())) {
        var types = there.dataType().simpleString() + " in the table, not " + field.dataType().simpleString();
        faults.add("'" + field.name() + "' is " + types);
      } else if (there.nullable() && !field.nullable()) {
        faults.add("'" + field.name() + "' may be null in the table; remove NOT NULL");
      }
    }
    if (!faults.isEmpty()) {
      throw new SteleException(
          SteleException.SCHEMA_MISMATCH,
          "schema: " + String.join("; ", faults) + "; the table has " + String.join(", ", have.keySet()));
    }
  }

  /** Stele's name for the type of a column that is to be made. */
  static String named(StructField field) {
    return switch (field.dataType().simpleString()) {
      case "boolean" -> "bool";
      case "tinyint" -> "int8";
      case "smallint" -> "int16";
      case "int" -> "int32";
      case "bigint" -> "int64";
      default -> field.dataType().simpleString();
    };
  }

  static List<String> names(StructType schema) {
    return Arrays.stream(schema.fields()).map(StructField::name).collect(Collectors.toList());
  }
}
