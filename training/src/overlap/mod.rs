//! How much of the communication of a step is hidden behind its computation, with the gradients of ResNet-50.
//!
//! The gradients have the sizes and the order of the real network. Their values are made up, and the computation is imitated.

mod compute;
mod resnet50;

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::group::{Gradients, Group, Means, Step};
use crate::job::{Compute, Overlap, OverlapJob, Spread};
use crate::processes::cores;
use compute::{Matrices, Processor, Schedule};

/// Steps before the measured ones, of each kind.
const WARM_UP: usize = 2;

/// Measurements of the communication alone, from which the duration of a step follows.
const ALONE: usize = 7;

/// The largest number of steps before the measured ones. The communicator chooses the size of its buckets in the first steps.
const MOST_STEPS: usize = 100;

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
    /// The gradients of this rank, in the order of the backward pass.
    tensors: Vec<Vec<f32>>,
    /// The number of tensors of each layer.
    layers: Vec<usize>,
    schedule: Schedule,
    gradients: Gradients,
    /// Whether a step with these gradients has ended, so that they have places.
    has_places: bool,
    compute: Compute,
}

/// Measures as one rank of the group. The result is the same on all ranks, but for the reports of the communicator.
pub(crate) fn measure(job: &OverlapJob, group: &Group) -> Result<Overlap, Failure> {
    let mut bench = Bench::new(group, job.compute)?;
    let communication = bench.communication()?;
    // The size of the buckets is chosen anew, for steps with computation.
    bench.gradients = group.gradients(bench.tensors.len())?;
    bench.gradients.set_reported(false);
    let step_ms = job.step_ms.unwrap_or(STEP * communication.median);
    let processor = bench.processor(step_ms)?;
    bench.settle(&processor)?;
    let mut milliseconds: [Vec<f64>; 3] = Default::default();
    for step in 0..WARM_UP + job.steps {
        let measured = step >= WARM_UP;
        let mut turn = [0.0; 3];
        // The kinds take turns, so that what else the machine does meets all of them.
        for (kind, duration) in Kind::ALL.into_iter().zip(&mut turn) {
            bench.gradients.set_reported(measured && kind == Kind::WithOverlap);
            *duration = bench.step(kind, &processor)?.as_secs_f64() * 1e3;
        }
        group.maximum(&mut turn)?;
        if measured {
            milliseconds.iter_mut().zip(turn).for_each(|(all, one)| all.push(one));
        }
    }
    let [without_communication, without_overlap, with_overlap] = milliseconds.map(Spread::of);
    Ok(Overlap {
        ranks: group.size(),
        cores: cores(),
        compute: job.compute,
        tensors: bench.tensors.len(),
        bytes: bench.tensors.iter().map(|tensor| size_of_val(tensor.as_slice())).sum(),
        step_ms,
        communication_ms: communication,
        without_communication_ms: without_communication,
        without_overlap_ms: without_overlap,
        with_overlap_ms: with_overlap,
        hidden: hidden(without_communication.median, without_overlap.median, with_overlap.median),
        fusion: bench.gradients.report(),
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
    fn new(group: &'a Group, compute: Compute) -> Result<Self, Failure> {
        let layers = resnet50::layers();
        let lengths: Vec<usize> = layers.iter().flat_map(|layer| layer.tensors.iter().copied()).collect();
        let fill = |(tensor, length): (usize, &usize)| {
            (0..*length).map(|index| element(group.rank(), tensor, index)).collect()
        };
        Ok(Self {
            group,
            tensors: lengths.iter().enumerate().map(fill).collect(),
            schedule: Schedule::new(&layers),
            layers: layers.into_iter().map(|layer| layer.tensors.len()).collect(),
            gradients: group.gradients(lengths.len())?,
            has_places: false,
            compute,
        })
    }

    /// Measures the communication without any computation, and checks each element of the first result.
    fn communication(&mut self) -> Result<Spread, Failure> {
        let (mut milliseconds, mut steps) = (Vec::new(), 0);
        while milliseconds.len() < ALONE {
            self.group.barrier()?;
            let settled = self.gradients.is_settled();
            let mut step = self.gradients.begin()?;
            fill(&mut step, &self.tensors, 0..self.tensors.len())?;
            let began = Instant::now();
            ready(&mut step, &self.tensors, 0..self.tensors.len())?;
            let means = step.finish()?;
            let mut duration = [began.elapsed().as_secs_f64() * 1e3];
            self.group.maximum(&mut duration)?;
            if settled && steps >= WARM_UP {
                milliseconds.extend(duration);
            }
            if steps == 0 {
                check(&means, self.group.size(), |_| true)?;
            }
            steps = counted(steps)?;
        }
        Ok(Spread::of(milliseconds))
    }

    /// Makes the processor that computes a step in `step_ms` milliseconds.
    fn processor(&self, step_ms: f64) -> Result<Processor, Failure> {
        match self.compute {
            Compute::Wait | Compute::Copy => {
                Ok(Processor::Accelerator { step: Duration::from_secs_f64(step_ms / 1e3) })
            }
            Compute::Cores => {
                let matrices = Matrices::new()?;
                // All ranks measure at the same time, because they also compute at the same time, and may share cores.
                self.group.barrier()?;
                let mut unit = [matrices.measure(MEASURE)?.as_secs_f64() * 1e3];
                self.group.maximum(&mut unit)?;
                let [unit] = unit;
                Ok(Processor::Core { units: step_ms / unit, matrices })
            }
        }
    }

    /// Carries out steps with overlap until the communicator has chosen the size of their buckets.
    fn settle(&mut self, processor: &Processor) -> Result<(), Failure> {
        let mut steps = 0;
        while !self.gradients.is_settled() {
            self.step(Kind::WithOverlap, processor)?;
            steps = counted(steps)?;
        }
        Ok(())
    }

    /// Carries out one step, and returns its duration on this rank.
    fn step(&mut self, kind: Kind, processor: &Processor) -> Result<Duration, Failure> {
        // An accelerator writes the gradients to their places itself, which takes no core. So they are there before the step.
        // In its first step, the communicator has no places yet.
        let already_there = self.compute == Compute::Wait && self.has_places;
        if already_there {
            // This step starts no bucket, so the next one replaces it, with the same places.
            fill(&mut self.gradients.begin()?, &self.tensors, 0..self.tensors.len())?;
        }
        self.group.barrier()?;
        let began = Instant::now();
        let mut computing = processor.begin();
        let mut step = self.gradients.begin()?;
        computing.until(self.schedule.forward)?;
        let mut first = 0;
        for (tensors, until) in self.layers.iter().zip(&self.schedule.layers) {
            computing.until(*until)?;
            let tensors = first..first + tensors;
            first = tensors.end;
            if !already_there {
                fill(&mut step, &self.tensors, tensors.clone())?;
            }
            if kind == Kind::WithOverlap {
                ready(&mut step, &self.tensors, tensors)?;
            }
        }
        match kind {
            // The step is dropped, and nothing of it was given away.
            Kind::WithoutCommunication => return Ok(began.elapsed()),
            Kind::WithoutOverlap => ready(&mut step, &self.tensors, 0..first)?,
            Kind::WithOverlap => {}
        }
        let means = step.finish()?;
        let duration = began.elapsed();
        self.has_places = true;
        // The first step checked all elements. These look for a step that did not reduce at all.
        check(&means, self.group.size(), |index| index.is_multiple_of(4096))?;
        Ok(duration)
    }
}

/// Counts a step that precedes the measured ones.
fn counted(steps: usize) -> Result<usize, Failure> {
    match steps + 1 {
        MOST_STEPS => {
            Err(Failure::run(format!("the size of the buckets is not chosen after {MOST_STEPS} steps")))
        }
        steps => Ok(steps),
    }
}

/// Copies some gradients to their places.
fn fill(step: &mut Step<'_>, tensors: &[Vec<f32>], which: Range<usize>) -> Result<(), Failure> {
    let tensors = which.clone().zip(tensors.get(which).unwrap_or(&[]));
    tensors.into_iter().try_for_each(|(index, tensor)| step.fill(index, tensor))
}

/// Gives some gradients away to be reduced.
fn ready(step: &mut Step<'_>, tensors: &[Vec<f32>], which: Range<usize>) -> Result<(), Failure> {
    let tensors = which.clone().zip(tensors.get(which).unwrap_or(&[]));
    tensors.into_iter().try_for_each(|(index, tensor)| step.ready(index, tensor.len()))
}

/// Checks the elements of the result whose index `which` selects.
fn check(means: &Means<'_>, ranks: usize, which: impl Fn(usize) -> bool) -> Result<(), Failure> {
    for tensor in 0..means.len() {
        let found = means.mean(tensor)?.iter().enumerate();
        for (index, value) in found.filter(|(index, _)| which(*index)) {
            let expected = mean(ranks, tensor, index);
            if value.to_bits() != expected.to_bits() {
                return Err(Failure::run(format!(
                    "element {index} of tensor {tensor} is {value} after the reduction, and has to be {expected}"
                )));
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
