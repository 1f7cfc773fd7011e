package dev.stele.spark;

import java.math.BigDecimal;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** A column of numbers in a wider type than the table's (Types.widens). A value is converted when Spark asks for it. */
final class Widened extends ColumnVector {
  private final ColumnVector narrow;

  Widened(ColumnVector narrow, DataType wanted) {
    super(wanted);
    this.narrow = narrow;
  }

  @Override
  public void close() {
    narrow.close();
  }

  @Override
  public boolean hasNull() {
    return narrow.hasNull();
  }

  @Override
  public int numNulls() {
    return narrow.numNulls();
  }

  @Override
  public boolean isNullAt(int row) {
    return narrow.isNullAt(row);
  }

  @Override
  public short getShort(int row) {
    return (short) whole(row);
  }

  @Override
  public int getInt(int row) {
    return (int) whole(row);
  }

  @Override
  public long getLong(int row) {
    return whole(row);
  }

  @Override
  public float getFloat(int row) {
    return whole(row);
  }

  @Override
  public double getDouble(int row) {
    return narrow.dataType() instanceof FloatType ? narrow.getFloat(row) : whole(row);
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    if (narrow.isNullAt(row)) {
      return null;
    }
    var value =
        narrow.dataType() instanceof DecimalType of
            ? narrow.getDecimal(row, of.precision(), of.scale()).toJavaBigDecimal()
            : BigDecimal.valueOf(whole(row));
    return Decimal.apply(value, precision, scale);
  }

  private long whole(int row) {
    var type = narrow.dataType();
    if (type instanceof ByteType) {
      return narrow.getByte(row);
    }
    if (type instanceof ShortType) {
      return narrow.getShort(row);
    }
    return type instanceof IntegerType ? narrow.getInt(row) : narrow.getLong(row);
  }

  @Override
  public boolean getBoolean(int row) {
    throw notANumber();
  }

  @Override
  public byte getByte(int row) {
    throw notANumber();
  }

  @Override
  public ColumnarArray getArray(int row) {
    throw notANumber();
  }

  @Override
  public ColumnarMap getMap(int row) {
    throw notANumber();
  }

  @Override
  public UTF8String getUTF8String(int row) {
    throw notANumber();
  }

  @Override
  public byte[] getBinary(int row) {
    throw notANumber();
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    throw notANumber();
  }

  private UnsupportedOperationException notANumber() {
    return new UnsupportedOperationException(narrow.dataType() + " is not widened to such a type");
  }
}
