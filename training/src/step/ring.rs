//! The ring allreduce as nodes of the graph (Gibiansky, *Bringing HPC techniques to deep learning*, Baidu 2017).
//!
//! A gradient is cut into as many ranges as there are workers. In each of W − 1 rounds, each worker sends one range to its right neighbour,
//! which adds its own range. At the end each range is complete at one worker.
//!
//! ```text
//!  round 1    cut.…@0 ─▶ add.…@1      round 2    add.…@1 ─▶ add.…@2      at the end    add.…@2 ─▶ all workers
//! ```
//!
//! Baidu's second half passes the complete ranges on round the ring. Here the worker that has completed a range sends it to each of the others.
//! Each worker sends as many bytes as in the ring, (W − 1) / W of the gradient, and the sender is always the node that made the
//! tensor, so the tensor lies in registered memory.
//!
//! Range c is added up in the order of the ring, beginning with worker c. A small gradient is one range, because the rounds of a small
//! range take as long as those of an empty one; the workers with which such gradients begin follow one another, so that all have the
//! same work.

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::Outlet;
use tonic_rdma_tensor::Dtype;

use super::{Builder, Shape, blocks, first, inputs, known, output};
use crate::Error;
use crate::array::Array;
use crate::data::part;
use crate::variables::Gradient;

/// A gradient with fewer elements is one range.
const CUT: usize = 4096;

impl Shape {
    /// Adds the allreduce of the gradients of a variable, and a push at each worker. `turn` is the number of the variable.
    pub(super) fn add_ring(
        &self,
        builder: &mut Builder,
        name: &str,
        length: usize,
        turn: usize,
        gradients: &[Outlet],
    ) -> Result<(), GraphError> {
        let workers = self.workers;
        // Each range, with the worker that begins it.
        let ranges: Vec<_> = match length >= CUT.max(workers) {
            true => (0..workers).map(|range| (range, part(length, workers, range))).collect(),
            false => vec![(turn % workers, 0..length)],
        };
        let fact = |length| known(Dtype::F32, &[length]);
        // The nodes that cut each worker's gradient into ranges, which share its memory.
        let mut cuts = Vec::new();
        for (worker, gradient) in gradients.iter().enumerate() {
            let parts: Vec<_> = ranges.iter().map(|(_, range)| range.clone()).collect();
            let facts = parts.iter().map(|range| fact(range.len())).collect();
            let cut = move |_, arrays| {
                let [gradient] = inputs(arrays)?;
                let gradient = gradient.as_floats()?;
                parts.iter().map(|part| Ok(Array::Floats(gradient.range(part.clone())?))).collect()
            };
            let name = format!("cut.{name}@{worker}");
            cuts.push((worker, builder.node(worker, name, vec![*gradient], facts, false, cut)?));
        }
        let mut rings: Vec<_> =
            ranges.iter().map(|(begin, _)| cuts.iter().copied().cycle().skip(*begin)).collect();
        let mut sums: Vec<Outlet> = Vec::new();
        for round in 0..workers {
            for (place, (ring, (_, range))) in rings.iter_mut().zip(&ranges).enumerate() {
                let Some((worker, cut)) = ring.next() else { continue };
                let own = output(cut, place);
                let Some(sum) = sums.get_mut(place) else {
                    sums.push(own);
                    continue;
                };
                let name = format!("add.{name}.{place}.{round}@{worker}");
                let facts = vec![fact(range.len())];
                *sum = first(builder.node(worker, name, vec![*sum, own], facts, false, add_up)?);
            }
        }
        for worker in 0..workers {
            let ranges = |arrays: &[Array]| Ok(Gradient::Ranges(blocks(arrays)?));
            builder.push(worker, &self.suffix(worker), name, sums.clone(), ranges)?;
        }
        Ok(())
    }
}

fn add_up(_step: u64, arrays: Vec<Array>) -> Result<Vec<Array>, Error> {
    let [sum, own] = inputs(arrays)?;
    let (sum, own) = (sum.as_floats()?, own.as_floats()?);
    let sums: Vec<f32> = sum.values().iter().zip(own.values()).map(|(sum, own)| sum + own).collect();
    Ok(vec![Array::floats(&[sums.len()], sums)?])
}
