//! How much of the communication of a step is hidden behind its computation, with the gradients of ResNet-50.
//!
//! The gradients have the sizes and the order of the real network. Their values are made up, and the computation is imitated.

mod compute;
mod resnet50;

use std::time::{Duration, Instant};

use tonic_rdma_collective::{Fusion, Means, Reduction, Step};

use crate::failure::Error;
use crate::group::Group;
use crate::options::{Compute, Options};
use crate::processes::cores;
use crate::results::{Overlap, Spread};
use crate::train::fusion_report;
use compute::{Matrices, Processor, Schedule};

/// Measured steps of each kind, unless --steps says otherwise.
const STEPS: usize = 20;

/// Steps before the measured ones, of each kind.
const WARM_UP: usize = 2;

/// Measurements of the communication alone, from which the duration of a step follows.
const ALONE: usize = 7;

/// The duration of a step, if none is given, as a multiple of that of the communication. The backward pass, which is two thirds of
/// a step, then takes as long as the communication.
const STEP: f64 = 1.5;

/// For how long the speed of the core is measured.
const MEASURE: Duration = Duration::from_millis(300);

/// A kind of step. In each kind, a gradient comes to its place in the same way, so the kinds differ by their communication alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The gradients stay with their rank.
    WithoutCommunication,
    /// All gradients are given away after the whole computation.
    WithoutOverlap,
    /// Each gradient is given away as soon as it is computed.
    WithOverlap,
}

impl Kind {
    const ALL: [Self; 3] = [Self::WithoutCommunication, Self::WithoutOverlap, Self::WithOverlap];
}

/// One rank of the measurement.
struct Bench<'a> {
    group: &'a Group,
    /// The names and the gradients of this rank, in the order of the backward pass.
    tensors: Vec<(String, Vec<f32>)>,
    /// The number of tensors of each layer.
    layers: Vec<usize>,
    schedule: Schedule,
    /// Averages the gradients over all ranks, in buckets.
    fusion: Fusion<f32>,
    /// Whether a step with these gradients has ended, so that they have places.
    has_places: bool,
    compute: Compute,
    /// What the communicator says of the steps with overlap.
    reported: tonic_rdma_collective::Overlap,
}

/// Measures as one rank of the group. The result is the same on all ranks, but for the reports of the communicator.
pub(crate) fn measure(job: &Options, group: &Group) -> Result<Overlap, Error> {
    let mut bench = Bench::new(group, job.compute)?;
    let communication = bench.communication()?;
    let step_ms = job.step_ms.unwrap_or(STEP * communication.median);
    let processor = bench.processor(step_ms)?;
    let (mut milliseconds, steps): ([Vec<f64>; 3], _) = (Default::default(), job.steps.unwrap_or(STEPS));
    for step in 0..WARM_UP + steps {
        if step == WARM_UP {
            bench.reported = tonic_rdma_collective::Overlap::default();
        }
        let mut turn = [0.0; 3];
        // The kinds take turns, so that what else the machine does meets all of them.
        for (kind, duration) in Kind::ALL.into_iter().zip(&mut turn) {
            *duration = bench.step(kind, Some(&processor))?.as_secs_f64() * 1e3;
        }
        group.reduce(&mut turn, Reduction::Max)?;
        if step >= WARM_UP {
            milliseconds.iter_mut().zip(turn).for_each(|(all, one)| all.push(one));
        }
    }
    let [without_communication, without_overlap, with_overlap] = milliseconds.map(Spread::of);
    Ok(Overlap {
        ranks: group.size(),
        cores: cores(),
        compute: job.compute,
        tensors: bench.tensors.len(),
        bytes: bench.tensors.iter().map(|(_, tensor)| size_of_val(tensor.as_slice())).sum(),
        step_ms,
        communication_ms: communication,
        without_communication_ms: without_communication,
        without_overlap_ms: without_overlap,
        with_overlap_ms: with_overlap,
        hidden: hidden(without_communication.median, without_overlap.median, with_overlap.median),
        fusion: fusion_report(&bench.fusion, steps, &bench.reported, group.rank()),
    })
}

/// Returns the share of the communication that the overlap hides.
fn hidden(without_communication: f64, without_overlap: f64, with_overlap: f64) -> Option<f64> {
    let communication = without_overlap - without_communication;
    (communication > 0.0).then(|| (without_overlap - with_overlap) / communication)
}

/// Returns element `index` of a gradient of a rank. It is a small integer, so that the mean over the ranks is exact in f32.
fn element(rank: usize, tensor: usize, index: usize) -> f32 {
    ((rank + 1) * ((tensor + index) % 61 + 1)) as f32
}

/// Returns the mean of [`element`] over all ranks.
fn mean(ranks: usize, tensor: usize, index: usize) -> f32 {
    (ranks + 1) as f32 / 2.0 * ((tensor + index) % 61 + 1) as f32
}

impl<'a> Bench<'a> {
    fn new(group: &'a Group, compute: Compute) -> Result<Self, Error> {
        let layers = resnet50::layers();
        let lengths = layers.iter().flat_map(|layer| layer.tensors.iter().copied());
        let fill = |(tensor, length): (usize, usize)| {
            let elements = (0..length).map(|index| element(group.rank(), tensor, index));
            (tensor.to_string(), elements.collect())
        };
        Ok(Self {
            group,
            tensors: lengths.enumerate().map(fill).collect(),
            schedule: Schedule::new(&layers),
            layers: layers.into_iter().map(|layer| layer.tensors.len()).collect(),
            fusion: Fusion::builder(&group.communicator).build()?,
            has_places: false,
            compute,
            reported: tonic_rdma_collective::Overlap::default(),
        })
    }

    /// Measures the communication without any computation.
    fn communication(&mut self) -> Result<Spread, Error> {
        let mut milliseconds = Vec::new();
        for step in 0..WARM_UP + ALONE {
            let mut duration = [self.step(Kind::WithoutOverlap, None)?.as_secs_f64() * 1e3];
            self.group.reduce(&mut duration, Reduction::Max)?;
            if step >= WARM_UP {
                milliseconds.extend(duration);
            }
        }
        Ok(Spread::of(milliseconds))
    }

    /// Makes the processor that computes a step in `step_ms` milliseconds.
    fn processor(&self, step_ms: f64) -> Result<Processor, Error> {
        if self.compute != Compute::Cores {
            return Ok(Processor::Accelerator { step: Duration::from_secs_f64(step_ms / 1e3) });
        }
        let matrices = Matrices::new()?;
        // All ranks measure at the same time, because they also compute at the same time, and may share cores.
        self.group.barrier()?;
        let mut unit = [matrices.measure(MEASURE)?.as_secs_f64() * 1e3];
        self.group.reduce(&mut unit, Reduction::Max)?;
        let [unit] = unit;
        Ok(Processor::Core { units: step_ms / unit, matrices })
    }

    /// Carries out one step, and returns its duration on this rank. Nothing is computed without a processor.
    fn step(&mut self, kind: Kind, processor: Option<&Processor>) -> Result<Duration, Error> {
        // An accelerator writes the gradients to their places itself, which takes no core. So they are there before the step.
        // In its first step, the communicator has no places yet.
        let already_there = (self.compute == Compute::Wait || processor.is_none()) && self.has_places;
        if already_there {
            // This step starts no bucket, so the next one replaces it, with the same places.
            fill(&mut self.fusion.step()?, &self.tensors)?;
        }
        self.group.barrier()?;
        let began = Instant::now();
        let mut computing = processor.map(Processor::begin);
        let mut compute = |until| computing.as_mut().map_or(Ok(()), |computing| computing.until(until));
        let mut step = self.fusion.step()?;
        compute(self.schedule.forward)?;
        let mut left = self.tensors.as_slice();
        for (number, until) in self.layers.iter().zip(&self.schedule.layers) {
            compute(*until)?;
            let of_layer = left.split_off(..*number).unwrap_or_default();
            if !already_there {
                fill(&mut step, of_layer)?;
            }
            if kind == Kind::WithOverlap {
                ready(&mut step, of_layer)?;
            }
        }
        match kind {
            // The step is dropped, and nothing of it was given away.
            Kind::WithoutCommunication => return Ok(began.elapsed()),
            Kind::WithoutOverlap => ready(&mut step, &self.tensors)?,
            Kind::WithOverlap => {}
        }
        let means = step.finish().wait()?;
        let duration = began.elapsed();
        if kind == Kind::WithOverlap {
            self.reported += means.overlap();
        }
        // The first step checks all elements. The others look for a step that did not reduce at all.
        let every = if self.has_places { 4096 } else { 1 };
        check(&means, &self.tensors, self.group.size(), |index| index.is_multiple_of(every))?;
        self.has_places = true;
        Ok(duration)
    }
}

/// Copies some gradients to their places.
fn fill(step: &mut Step<'_, f32>, tensors: &[(String, Vec<f32>)]) -> Result<(), Error> {
    for (name, tensor) in tensors {
        step.slot(name, tensor.len())?.copy_from_slice(tensor);
    }
    Ok(())
}

/// Gives some gradients away to be reduced.
fn ready(step: &mut Step<'_, f32>, tensors: &[(String, Vec<f32>)]) -> Result<(), Error> {
    for (name, tensor) in tensors {
        step.slot(name, tensor.len())?.ready()?;
    }
    Ok(())
}

/// Checks the elements of the result whose index `which` selects.
fn check(
    means: &Means<'_, f32>,
    tensors: &[(String, Vec<f32>)],
    ranks: usize,
    which: impl Fn(usize) -> bool,
) -> Result<(), Error> {
    for (tensor, (name, _)) in tensors.iter().enumerate() {
        let found = means.get(name).ok_or_else(|| format!("there is no mean of tensor {name}"))?;
        for (index, value) in found.iter().enumerate().filter(|(index, _)| which(*index)) {
            let expected = mean(ranks, tensor, index);
            if value.to_bits() != expected.to_bits() {
                return Err(format!(
                    "element {index} of tensor {tensor} is {value} after the reduction, and has to be {expected}"
                )
                .into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hidden_share_is_of_the_communication() {
        assert_eq!(hidden(40.0, 80.0, 40.0), Some(1.0));
        assert_eq!(hidden(40.0, 80.0, 80.0), Some(0.0));
        assert_eq!(hidden(40.0, 80.0, 56.0), Some(0.6));
        assert_eq!(hidden(40.0, 40.0, 40.0), None);
    }

    #[test]
    fn the_mean_of_the_elements_is_exact() {
        for ranks in 1..=64 {
            for index in 0..61 {
                let sum: f32 = (0..ranks).map(|rank| element(rank, 7, index)).sum();
                assert_eq!(sum / ranks as f32, mean(ranks, 7, index));
            }
        }
    }
}
