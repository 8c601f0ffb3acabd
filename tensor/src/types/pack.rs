//! Packs elements that don't lie one after the other: copies them into row-major order.

use super::{Shape, Strides};

/// The starts of a tensor's rows, in elements from the start of its storage, in row-major order. A row is the longest
/// innermost run of elements with a constant step.
#[derive(Debug)]
pub(super) struct Rows {
    /// Length, step and current index of each dimension outside the row, the slowest first.
    outer: Vec<(u64, u64, u64)>,
    inner: (usize, usize),
    at: usize,
    left: u64,
}

impl Rows {
    /// Makes the rows of a tensor of `shape` and `strides` whose first element is at `offset`.
    pub(super) fn new(shape: &Shape, strides: &Strides, offset: usize) -> Self {
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(shape.rank());
        for (&length, &step) in shape.dims().iter().zip(strides.steps()).filter(|&(&length, _)| length != 1) {
            match merged.last_mut() {
                // One step of the outer dimension is as long as the whole inner dimension: both are one run.
                Some(outer) if step.checked_mul(length) == Some(outer.1) => *outer = (outer.0 * length, step),
                _ => merged.push((length, step)),
            }
        }
        let (length, step) = merged.pop().unwrap_or((1, 1));
        let left = if shape.elements() == 0 { 0 } else { merged.iter().map(|&(length, _)| length).product() };
        let outer = merged.into_iter().map(|(length, step)| (length, step, 0)).collect();
        Self { outer, inner: (length as usize, step as usize), at: offset, left }
    }

    /// Returns the length of each row, and the step between its elements.
    pub(super) fn inner(&self) -> (usize, usize) {
        self.inner
    }
}

impl Iterator for Rows {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let start = self.at;
        for (length, step, place) in self.outer.iter_mut().rev() {
            *place += 1;
            if *place < *length {
                self.at += *step as usize;
                break;
            }
            self.at -= (*step * (*length - 1)) as usize;
            *place = 0;
        }
        Some(start)
    }
}

/// Copies the elements of `rows`, each of `size` bytes, from `source` to `destination`, one after the other. All rows lie in
/// the source, and fill the destination.
pub(super) fn pack(source: &[u8], size: usize, rows: Rows, destination: &mut [u8]) {
    match size {
        1 => pack_elements::<1>(source, rows, destination),
        2 => pack_elements::<2>(source, rows, destination),
        4 => pack_elements::<4>(source, rows, destination),
        8 => pack_elements::<8>(source, rows, destination),
        _ => pack_elements::<16>(source, rows, destination),
    }
}

fn pack_elements<const SIZE: usize>(source: &[u8], rows: Rows, destination: &mut [u8]) {
    let (source, _) = source.as_chunks::<SIZE>();
    let (mut destination, _) = destination.as_chunks_mut::<SIZE>();
    let (length, step) = rows.inner();
    for start in rows {
        let (row, rest) = destination.split_at_mut(length);
        match step {
            0 => row.fill(source[start]),
            1 => row.copy_from_slice(&source[start..start + length]),
            _ => {
                for (to, from) in row.iter_mut().zip(source[start..].iter().step_by(step)) {
                    *to = *from;
                }
            }
        }
        destination = rest;
    }
}
