//! The batches, and the check of batches that arrived.

use std::sync::Arc;

use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, cast::AsArray as _};

/// Columns of a batch, as in Arrow's own Flight benchmark.
const COLUMNS: usize = 4;
/// Numbers in a page of 4 KiB.
const PAGE: usize = 512;
/// A stream has these batches again and again.
const DIFFERENT: usize = 4;
/// Bytes of a stream.
const STREAM: usize = 128 << 20;

/// Returns the number of batches of a stream.
pub(crate) fn batches_in_stream(bytes: usize) -> usize {
    (STREAM / bytes).max(DIFFERENT)
}

fn number(row: usize, column: usize, seed: usize) -> i64 {
    ((row * COLUMNS + column) as i64).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64) ^ seed as i64
}

/// The batches of a stream of batches of one length.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    different: Vec<RecordBatch>,
    count: usize,
}

impl Content {
    /// Makes the batches, of `bytes` bytes each.
    pub(crate) fn new(bytes: usize) -> Self {
        let rows = bytes / (COLUMNS * size_of::<i64>());
        let batch = |seed| {
            let column = |column| -> ArrayRef {
                Arc::new((0..rows).map(|row| number(row, column, seed)).collect::<Int64Array>())
            };
            RecordBatch::try_from_iter((0..COLUMNS).map(|index| (format!("c{index}"), column(index))))
                .unwrap()
        };
        Self { different: (0..DIFFERENT).map(batch).collect(), count: batches_in_stream(bytes) }
    }

    pub(crate) fn first(&self) -> &RecordBatch {
        &self.different[0]
    }

    /// Returns the stream.
    pub(crate) fn stream(&self) -> impl Iterator<Item = RecordBatch> + Send + use<> {
        let (different, count) = (self.different.clone(), self.count);
        (0..count).map(move |index| different[index % DIFFERENT].clone())
    }
}

/// The check of one stream.
#[derive(Debug)]
pub(crate) struct Check {
    /// Rows of a batch before the sender cut it.
    rows: usize,
    /// Rows that have arrived.
    at: usize,
    step: usize,
    count: usize,
}

impl Check {
    /// Checks a stream of batches of `bytes` bytes, all numbers or one in each page.
    pub(crate) fn new(bytes: usize, all: bool) -> Self {
        let rows = bytes / (COLUMNS * size_of::<i64>());
        Self { rows, at: 0, step: if all { 1 } else { PAGE }, count: batches_in_stream(bytes) }
    }

    /// Checks the next batch, or a part of one.
    pub(crate) fn next(&mut self, batch: &RecordBatch) {
        let (seed, first) = (self.at / self.rows % DIFFERENT, self.at % self.rows);
        assert_eq!(batch.num_columns(), COLUMNS);
        for column in 0..COLUMNS {
            let numbers = batch.column(column).as_primitive::<Int64Type>().values();
            let last = numbers.len() - 1;
            for row in (0..=last).step_by(self.step).chain([last]) {
                let (found, expected) = (numbers[row], number(first + row, column, seed));
                assert_eq!(found, expected, "row {row}, column {column} of batch {}", self.at / self.rows);
            }
        }
        self.at += batch.num_rows();
    }

    /// Checks that the stream is complete.
    pub(crate) fn end(self) {
        assert_eq!(self.at, self.rows * self.count, "rows");
    }
}
