package dev.stele.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Arrays;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.types.StructType;

/** The changes of an ALTER TABLE as the action `alter-table` has them (docs/flight.md). Asks nobody. */
final class Alteration {
  static final String HISTORY = "history_s";
  private static final String COPY = "; create a new table, and copy the rows into it";

  private final String what;
  private final StructType schema;
  private final ObjectNode body;

  private Alteration(String table, StructType schema) {
    this.what = "ALTER TABLE " + table + ": ";
    this.schema = schema;
    this.body = Cluster.command(table);
  }

  /** `schema`: the table's columns before the changes. */
  static ObjectNode of(String table, StructType schema, TableChange... changes) {
    var alteration = new Alteration(table, schema);
    for (var change : changes) {
      if (change instanceof TableChange.ColumnChange of) {
        alteration.changeColumn(of);
      } else {
        alteration.changeTable(change);
      }
    }
    return alteration.body;
  }

  private void changeColumn(TableChange.ColumnChange change) {
    var name = named(change.fieldNames());
    if (change instanceof TableChange.AddColumn add) {
      add(name, add);
    } else if (change instanceof TableChange.DeleteColumn) {
      body.withArray("/drop").add(name);
    } else if (change instanceof TableChange.RenameColumn rename) {
      body.withArray("/rename").addArray().add(name).add(rename.newName());
    } else if (change instanceof TableChange.UpdateColumnDefaultValue update) {
      var sql = update.newDefaultValue();
      body.withArray("/defaults").addArray().add(name).add(sql == null || sql.isEmpty() ? null : json(name, sql));
    } else if (change instanceof TableChange.UpdateColumnType) {
      throw refused("the type of column " + name + " cannot change" + COPY);
    } else if (change instanceof TableChange.UpdateColumnNullability) {
      throw refused("whether column " + name + " may be null cannot change" + COPY);
    } else if (change instanceof TableChange.UpdateColumnComment) {
      throw refused(noComment(name));
    } else if (change instanceof TableChange.UpdateColumnPosition) {
      throw refused("column " + name + " cannot move; a SELECT names columns in any order");
    } else {
      throw other();
    }
  }

  private void add(String name, TableChange.AddColumn add) {
    if (add.comment() != null) {
      throw refused(noComment(name));
    }
    if (add.position() != null) {
      throw refused("column " + name + " comes last, as each new column does; leave out FIRST and AFTER");
    }
    var type = Types.named(add.dataType());
    var column = body.withArray("/add").addArray().add(name).add(type).add(add.isNullable());
    if (add.defaultValue() != null) {
      column.add(Defaults.json("ALTER TABLE", what, name, add.dataType(), add.defaultValue().getSql()));
    }
  }

  private void changeTable(TableChange change) {
    if (change instanceof TableChange.SetProperty set && isNote(set.property())) {
      body.put(set.property(), set.value());
    } else if (change instanceof TableChange.RemoveProperty remove && isNote(remove.property())) {
      body.put(remove.property(), "");
    } else if (change instanceof TableChange.SetProperty set && set.property().equals(HISTORY)) {
      body.put(HISTORY, seconds(what, set.value()));
    } else if (change instanceof TableChange.RemoveProperty remove && remove.property().equals(HISTORY)) {
      body.put(HISTORY, 0);
    } else if (change instanceof TableChange.SetProperty set) {
      throw refused("property '" + set.property() + "' cannot change; comment and " + HISTORY + " can");
    } else if (change instanceof TableChange.RemoveProperty remove) {
      throw refused("property '" + remove.property() + "' cannot change; comment and " + HISTORY + " can");
    } else {
      throw other();
    }
  }

  private String json(String name, String sql) {
    var field = Arrays.stream(schema.fields()).filter(f -> f.name().equals(name)).findFirst();
    if (field.isEmpty()) {
      throw refused("there is no column " + name);
    }
    return Defaults.json("ALTER TABLE", what, name, field.get().dataType(), sql);
  }

  private static boolean isNote(String property) {
    return property.equals(TableCatalog.PROP_COMMENT) || property.equals(TableCatalog.PROP_OWNER);
  }

  private String named(String[] path) {
    if (path.length > 1) {
      throw refused(String.join(".", path) + " is a field of a column; Stele's columns have no fields");
    }
    return path[0];
  }

  private RuntimeException other() {
    return refused(
        "ALTER TABLE can add, drop and rename columns, change their defaults, rename the table, and set its comment and "
            + HISTORY + "; for ranges use `stele table alter`, Python or a TabletGroup");
  }

  private RuntimeException refused(String why) {
    return SteleException.refused(what + why);
  }

  /** Of a new table's columns, too. */
  static String noComment(String column) {
    return "column " + column + " has a comment, which Stele does not keep; leave it out, or write it into the table's comment";
  }

  /** A history in seconds; 0 for the default. */
  static long seconds(String what, String text) {
    try {
      return Long.parseLong(text.trim());
    } catch (NumberFormatException e) {
      throw SteleException.refused(what + HISTORY + " is '" + text + "'; expected seconds, such as 86400, or 0 for the default");
    }
  }
}
