//! The lookup of rows of a table.

use tonic_rdma_graph::dataflow::KernelError;

use crate::array::{Array, Block};

/// Returns the rows of `table`, whose numbers have the shape (samples, length), as an array of shape (samples, length, columns).
pub(super) fn rows(table: &Block<f32>, numbers: &Block<u32>) -> Result<Array, KernelError> {
    let [height, columns] = table.dims() else {
        return Err(format!("a table has two dimensions, found {:?}", table.dims()).into());
    };
    let mut rows = Vec::with_capacity(numbers.values().len() * columns);
    for number in numbers.values() {
        let from = *number as usize * columns;
        let row = table.values().get(from..from + columns);
        rows.extend_from_slice(row.ok_or_else(|| format!("a table of {height} rows has no row {number}"))?);
    }
    let dims: Vec<usize> = numbers.dims().iter().chain([columns]).copied().collect();
    Array::floats(&dims, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_looked_up_or_named() {
        let table = Block::new(&[3, 2], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let numbers = |numbers: &[u32]| Block::new(&[1, numbers.len()], numbers.to_vec()).unwrap();
        let found = rows(&table, &numbers(&[2, 0, 2])).unwrap();
        assert_eq!(found.as_floats().unwrap().dims(), [1, 3, 2]);
        assert_eq!(found.as_floats().unwrap().values(), [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
        assert!(rows(&table, &numbers(&[3])).unwrap_err().to_string().contains("no row 3"));
    }
}
