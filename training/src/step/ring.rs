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

use std::collections::HashMap;

use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{KernelError, Outlet};

use super::builder::{Builder, Described, first, floats, output};
use super::gradient::{WorkerGradient, gradient_of};
use super::shape::Shape;
use crate::array::{Array, Block};
use crate::data::shards::part;
use crate::variables::Gradient;

/// A gradient with fewer elements is one range.
const CUT: usize = 4096;

/// Adds all nodes of a step.
pub(super) fn add(builder: &mut Builder, shape: &Shape) -> Result<(), GraphError> {
    let shapes = shape.shapes();
    let holds = |worker: usize, name: &str| worker == 0 || name != super::recurrent::EMBEDDING;
    let mut of_worker: Vec<HashMap<String, Outlet>> = Vec::new();
    for worker in 0..shape.workers {
        let mut values = HashMap::new();
        for (name, dims) in shapes.iter().filter(|(name, _)| holds(worker, name)) {
            values.insert(name.clone(), builder.assign(worker, &format!("@{worker}"), name, dims)?);
        }
        of_worker.push(values);
    }
    // Worker 0 has the table of all workers.
    if let Some(table) = of_worker.first().and_then(|values| values.get(super::recurrent::EMBEDDING)).copied()
    {
        for values in &mut of_worker {
            values.insert(super::recurrent::EMBEDDING.to_owned(), table);
        }
    }
    let mut gradients: Vec<(String, Vec<WorkerGradient>)> = Vec::new();
    for (worker, values) in of_worker.iter().enumerate() {
        for (name, gradient) in shape.add_worker(builder, worker, values)? {
            match gradients.iter_mut().find(|(known, _)| *known == name) {
                Some((_, workers)) => workers.push(gradient),
                None => gradients.push((name, vec![gradient])),
            }
        }
    }
    for (number, (name, workers)) in gradients.into_iter().enumerate() {
        let dense: Option<Vec<Outlet>> = workers
            .iter()
            .map(|gradient| match gradient {
                WorkerGradient::Dense(gradient) => Some(*gradient),
                WorkerGradient::Rows { .. } => None,
            })
            .collect();
        match dense {
            Some(gradients) => {
                let dims =
                    shapes.iter().find(|(known, _)| *known == name).map(|(_, dims)| dims.iter().product());
                let ring =
                    Ring { name: &name, workers: shape.workers, length: dims.unwrap_or(0), turn: number };
                ring.add(builder, &gradients)?;
            }
            None => {
                let inputs = workers.iter().flat_map(|gradient| gradient.outlets()).collect();
                builder.push(0, "@0", &name, inputs, move |arrays| gradient_of(&workers, arrays))?;
            }
        }
    }
    Ok(())
}

/// The allreduce of one gradient.
struct Ring<'a> {
    name: &'a str,
    workers: usize,
    length: usize,
    /// The number of the gradient.
    turn: usize,
}

impl Ring<'_> {
    fn is_cut(&self) -> bool {
        self.length >= CUT.max(self.workers)
    }

    /// Returns the ranges that are not empty, each with the worker that begins it.
    fn ranges(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        match self.is_cut() {
            true => (0..self.workers).map(|range| (range, part(self.length, self.workers, range))).collect(),
            false => vec![(self.turn % self.workers, 0..self.length)],
        }
    }

    /// Adds the rounds, and a push at each worker.
    fn add(&self, builder: &mut Builder, gradients: &[Outlet]) -> Result<(), GraphError> {
        let ranges = self.ranges();
        let cut = self.cut(builder, gradients, &ranges)?;
        let mut sums: Vec<Outlet> = Vec::new();
        for (place, (begin, _)) in ranges.iter().enumerate() {
            sums.push(of(&cut, *begin, place, self.name)?);
        }
        for round in 1..self.workers {
            for (place, (begin, range)) in ranges.iter().enumerate() {
                let worker = (begin + round) % self.workers;
                let own = of(&cut, worker, place, self.name)?;
                if let Some(sum) = sums.get_mut(place) {
                    *sum = self.add_up(builder, (worker, place, round), [*sum, own], range.len())?;
                }
            }
        }
        for worker in 0..self.workers {
            builder.push(worker, &format!("@{worker}"), self.name, sums.clone(), |arrays| {
                let ranges: Result<Vec<Block<f32>>, KernelError> =
                    arrays.iter().map(|array| Ok(array.as_floats()?.clone())).collect();
                Ok(Gradient::Ranges(ranges?))
            })?;
        }
        Ok(())
    }

    /// Adds the nodes that cut each worker's gradient into ranges, which share its memory.
    fn cut(
        &self,
        builder: &mut Builder,
        gradients: &[Outlet],
        ranges: &[(usize, std::ops::Range<usize>)],
    ) -> Result<Vec<Vec<Outlet>>, GraphError> {
        let mut cut = Vec::new();
        for (worker, gradient) in gradients.iter().enumerate() {
            let parts: Vec<_> = ranges.iter().map(|(_, range)| range.clone()).collect();
            let node = Described {
                part: worker,
                name: format!("cut.{}@{worker}", self.name),
                kind: "Cut",
                inputs: vec![*gradient],
                outputs: parts.iter().map(|range| floats(&[range.len()])).collect(),
                work: 0,
                stays: false,
            };
            let node = builder.node(node, move |_, arrays| {
                let [gradient] = super::kernels::inputs(arrays)?;
                let gradient = gradient.as_floats()?;
                parts.iter().map(|part| Ok(Array::Floats(gradient.range(part.clone())?))).collect()
            })?;
            cut.push((0..ranges.len()).map(|place| output(node, place)).collect());
        }
        Ok(cut)
    }

    fn add_up(
        &self,
        builder: &mut Builder,
        (worker, place, round): (usize, usize, usize),
        inputs: [Outlet; 2],
        length: usize,
    ) -> Result<Outlet, GraphError> {
        let node = Described {
            part: worker,
            name: format!("add.{}.{place}.{round}@{worker}", self.name),
            kind: "Add",
            inputs: inputs.to_vec(),
            outputs: vec![floats(&[length])],
            work: length,
            stays: false,
        };
        Ok(first(builder.node(node, move |_, arrays| {
            let [sum, own] = super::kernels::inputs(arrays)?;
            let (sum, own) = (sum.as_floats()?, own.as_floats()?);
            let sums: Vec<f32> = sum.values().iter().zip(own.values()).map(|(sum, own)| sum + own).collect();
            Ok(vec![Array::floats(&[length], sums)?])
        })?))
    }
}

fn of(outlets: &[Vec<Outlet>], worker: usize, place: usize, name: &str) -> Result<Outlet, GraphError> {
    let outlet = outlets.get(worker).and_then(|outlets| outlets.get(place));
    outlet.copied().ok_or_else(|| GraphError::Node {
        node: format!("cut.{name}@{worker}"),
        reason: format!("there is no range {place}"),
    })
}
