//! Batches of many types.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::builder::{
    BinaryViewBuilder, Int32Builder, ListBuilder, MapBuilder, StringBuilder, StringDictionaryBuilder,
    StringRunBuilder, StringViewBuilder,
};
use arrow_array::types::{Float32Type, Int16Type, Int32Type};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, Decimal256Array,
    DurationNanosecondArray, FixedSizeBinaryArray, FixedSizeListArray, Float64Array, Int8Array, Int64Array,
    IntervalMonthDayNanoArray, LargeBinaryArray, LargeStringArray, NullArray, RecordBatch,
    RecordBatchOptions, StringArray, StructArray, Time64MicrosecondArray, TimestampMillisecondArray,
    UInt16Array, UInt64Array, UnionArray,
};
use arrow_buffer::{IntervalMonthDayNano, ScalarBuffer, i256};
use arrow_schema::{DataType, Field, Schema, UnionFields};

/// Returns `value` for two of three rows.
fn some<T>(row: usize, value: T) -> Option<T> {
    (row % 3 != 1).then_some(value)
}

/// Returns an array of each kind with `rows` rows, with a name each. Contents differ by `seed`.
pub(crate) fn columns(rows: usize, seed: usize) -> Vec<(&'static str, ArrayRef)> {
    let at = move |row: usize| row.wrapping_mul(31).wrapping_add(seed.wrapping_mul(7919));
    let text = move |row: usize| "ä€x".repeat(at(row) % 9) + &row.to_string();
    let numbers = || (0..rows).map(at);
    let longs = || numbers().map(|n| n as i64);
    let optional = || (0..rows).map(move |row| some(row, at(row)));
    let texts = || (0..rows).map(move |row| some(row, text(row)));
    let mut columns: Vec<(&'static str, ArrayRef)> = vec![
        ("null", Arc::new(NullArray::new(rows))),
        ("boolean", Arc::new(optional().map(|n| n.map(|n| n % 2 == 0)).collect::<BooleanArray>())),
        ("int8", Arc::new(optional().map(|n| n.map(|n| n as i8)).collect::<Int8Array>())),
        ("uint16", Arc::new(numbers().map(|n| n as u16).collect::<UInt16Array>())),
        ("int64", Arc::new(optional().map(|n| n.map(|n| n as i64)).collect::<Int64Array>())),
        ("uint64", Arc::new(numbers().map(|n| n as u64).collect::<UInt64Array>())),
        ("float64", Arc::new(optional().map(|n| n.map(|n| n as f64 / 3.0)).collect::<Float64Array>())),
        ("date32", Arc::new(Date32Array::from_iter_values(numbers().map(|n| n as i32)))),
        ("time64", Arc::new(Time64MicrosecondArray::from_iter_values(longs()))),
        ("duration", Arc::new(DurationNanosecondArray::from_iter_values(longs()))),
        ("utf8", Arc::new(texts().collect::<StringArray>())),
        ("large_utf8", Arc::new(texts().collect::<LargeStringArray>())),
        ("binary", Arc::new(texts().map(|t| t.map(String::into_bytes)).collect::<BinaryArray>())),
        ("large_binary", Arc::new(texts().map(|t| t.map(String::into_bytes)).collect::<LargeBinaryArray>())),
    ];
    let stamps = TimestampMillisecondArray::from_iter_values(longs()).with_timezone("Europe/Paris");
    columns.push(("timestamp", Arc::new(stamps)));
    let decimals = optional().map(|n| n.map(|n| n as i128 * 10_000_000_000)).collect::<Decimal128Array>();
    columns.push(("decimal128", Arc::new(decimals.with_precision_and_scale(38, 4).unwrap())));
    let decimals = optional().map(|n| n.map(|n| i256::from_i128(n as i128))).collect::<Decimal256Array>();
    columns.push(("decimal256", Arc::new(decimals.with_precision_and_scale(76, 4).unwrap())));
    let intervals = numbers().map(|n| IntervalMonthDayNano::new(n as i32, 2, n as i64));
    columns.push(("interval", Arc::new(IntervalMonthDayNanoArray::from_iter_values(intervals))));
    let fixed: Vec<Option<[u8; 3]>> = optional().map(|n| n.map(|n| [n as u8, 1, 2])).collect();
    let fixed = FixedSizeBinaryArray::try_from_sparse_iter_with_size(fixed.into_iter(), 3).unwrap();
    columns.push(("fixed_binary", Arc::new(fixed)));
    columns.extend(views(rows, &texts));
    columns.extend(nested(rows, &at, &text));
    columns
}

fn views<I>(rows: usize, texts: &dyn Fn() -> I) -> Vec<(&'static str, ArrayRef)>
where
    I: Iterator<Item = Option<String>>,
{
    // Long texts lie in buffers of their own, short ones within the view.
    let long = |text: Option<String>| text.map(|text| text.repeat(1 + rows % 4));
    let mut strings = StringViewBuilder::new();
    let mut binaries = BinaryViewBuilder::new();
    for text in texts() {
        strings.append_option(long(text.clone()));
        binaries.append_option(long(text));
    }
    vec![("utf8_view", Arc::new(strings.finish())), ("binary_view", Arc::new(binaries.finish()))]
}

fn nested(
    rows: usize,
    at: &dyn Fn(usize) -> usize,
    text: &dyn Fn(usize) -> String,
) -> Vec<(&'static str, ArrayRef)> {
    let mut lists = ListBuilder::new(StringBuilder::new());
    let mut maps = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    let mut dictionary = StringDictionaryBuilder::<Int16Type>::new();
    let mut runs = StringRunBuilder::<Int32Type>::new();
    for row in 0..rows {
        for item in 0..at(row) % 4 {
            lists.values().append_option(some(item, text(item)));
            maps.keys().append_value(text(item));
            maps.values().append_option(some(item, item as i32));
        }
        lists.append(row % 5 != 2);
        maps.append(row % 7 != 2).unwrap();
        dictionary.append_option(some(row, text(at(row) % 17)));
        runs.append_value(text(row / 10));
    }
    let floats =
        (0..rows).map(|row| some(row, (0..4).map(|item| Some((row * item) as f32)).collect::<Vec<_>>()));
    let vectors = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(floats, 4);
    let numbers: ArrayRef = Arc::new((0..rows).map(|row| some(row, at(row) as i64)).collect::<Int64Array>());
    let texts: ArrayRef = Arc::new((0..rows).map(|row| some(row + 1, text(row))).collect::<StringArray>());
    let dictionary: ArrayRef = Arc::new(dictionary.finish());
    let field = |name: &str, array: &ArrayRef| Arc::new(Field::new(name, array.data_type().clone(), true));
    let structs = StructArray::from(vec![
        (field("number", &numbers), Arc::clone(&numbers)),
        (field("text", &texts), Arc::clone(&texts)),
        (field("word", &dictionary), Arc::clone(&dictionary)),
    ]);
    let fields = UnionFields::try_new([0, 1], [field("number", &numbers), field("text", &texts)]).unwrap();
    let ids: ScalarBuffer<i8> = (0..rows).map(|row| (row % 2) as i8).collect();
    let union = UnionArray::try_new(fields, ids, None, vec![numbers, texts]).unwrap();
    vec![
        ("list", Arc::new(lists.finish())),
        ("map", Arc::new(maps.finish())),
        ("dictionary", dictionary),
        ("runs", Arc::new(runs.finish())),
        ("vectors", Arc::new(vectors)),
        ("struct", Arc::new(structs)),
        ("union", Arc::new(union)),
    ]
}

/// Returns a batch with a column of each kind.
pub(crate) fn of_all_kinds(rows: usize, seed: usize) -> RecordBatch {
    let columns = columns(rows, seed);
    let fields = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true));
    let schema = Schema::new(fields.collect::<Vec<_>>())
        .with_metadata(HashMap::from([("key".to_owned(), "value".to_owned())]));
    RecordBatch::try_new(Arc::new(schema), columns.into_iter().map(|(_, array)| array).collect()).unwrap()
}

/// Returns a batch of about `bytes` bytes: numbers, and numbers with nulls.
pub(crate) fn of_numbers(bytes: usize, seed: u64) -> RecordBatch {
    let rows = bytes / 16;
    let numbers: Int64Array = (0..rows).map(|row| (row as u64 ^ seed) as i64).collect();
    let floats: Float64Array = (0..rows).map(|row| some(row, row as f64 + seed as f64)).collect();
    RecordBatch::try_from_iter([("n", Arc::new(numbers) as ArrayRef), ("f", Arc::new(floats) as ArrayRef)])
        .unwrap()
}

/// Returns a batch of `rows` rows without columns.
pub(crate) fn without_columns(rows: usize) -> RecordBatch {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::new(Schema::empty()), Vec::new(), &options).unwrap()
}

#[test]
fn the_batch_of_all_kinds_has_them() {
    let batch = of_all_kinds(100, 1);
    let nulls: usize = batch.columns().iter().map(|column| column.null_count()).sum();
    assert!(batch.num_columns() == 28 && nulls > 500, "{} {nulls}", batch.num_columns());
    assert!(matches!(batch.column_by_name("dictionary").unwrap().data_type(), DataType::Dictionary(..)));
    assert_ne!(batch, of_all_kinds(100, 2));
}
