package dev.stele.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.types.Metadata;
import org.apache.spark.sql.types.StructField;

/** The changes of an ALTER TABLE as the action `alter-table` has them (docs/flight.md). Asks nobody. */
final class Alteration {
  private Alteration() {}

  static ObjectNode of(String table, TableChange... changes) {
    var body = Cluster.command(table);
    var what = "ALTER TABLE " + table + ": ";
    for (var change : changes) {
      if (change instanceof TableChange.AddColumn add) {
        if (add.comment() != null || add.position() != null || add.defaultValue() != null) {
          throw refused(what + "a new column comes last, without comment and default");
        }
        var name = named(what, add.fieldNames());
        var type = Types.named(new StructField(name, add.dataType(), add.isNullable(), Metadata.empty()));
        body.withArray("/add").addArray().add(name).add(type).add(add.isNullable());
      } else if (change instanceof TableChange.DeleteColumn drop) {
        body.withArray("/drop").add(named(what, drop.fieldNames()));
      } else if (change instanceof TableChange.RenameColumn rename) {
        body.withArray("/rename").addArray().add(named(what, rename.fieldNames())).add(rename.newName());
      } else if (change instanceof TableChange.SetProperty set && isNote(set.property())) {
        body.put(set.property(), set.value());
      } else if (change instanceof TableChange.RemoveProperty remove && isNote(remove.property())) {
        body.put(remove.property(), "");
      } else {
        throw refused(
            what + "ALTER TABLE can add, drop and rename columns, rename the table and set its comment; for ranges, "
                + "defaults and history use `stele table alter`, Python or a TabletGroup");
      }
    }
    return body;
  }

  private static boolean isNote(String property) {
    return property.equals(TableCatalog.PROP_COMMENT) || property.equals(TableCatalog.PROP_OWNER);
  }

  private static String named(String what, String[] path) {
    if (path.length > 1) {
      throw refused(what + String.join(".", path) + " is a field of a column; Stele's columns have no fields");
    }
    return path[0];
  }

  private static RuntimeException refused(String why) {
    throw SteleException.<RuntimeException>sneak(new SteleException(SteleException.INVALID_ARGUMENT, why).inDriver());
  }
}
