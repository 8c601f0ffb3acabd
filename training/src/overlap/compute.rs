//! The computation of an imitated step: on an accelerator, which takes no core, or on the core of the rank.

use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor};

use super::resnet50::Layer;

/// Side of the matrices whose product is one unit of work on a core: 2 · 96³ = 1.8 million operations.
const SIDE: usize = 96;

/// The share of a step's computation that is the forward pass. The backward pass computes two products of the same size for each of
/// the forward pass: the gradient of the weight, and that of the input.
const FORWARD: f64 = 1.0 / 3.0;

/// When each part of a step's computation is done, as a share of the whole: the forward pass, then the layers of the backward
/// pass.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) forward: f64,
    pub(crate) layers: Vec<f64>,
}

/// A processor that computes steps.
#[derive(Debug)]
pub(crate) enum Processor {
    /// An accelerator that computes a step in this time. Meanwhile the rank sleeps.
    Accelerator { step: Duration },
    /// The core of the rank, which computes this number of units in a step.
    Core { units: f64, matrices: Matrices },
}

/// The computation of one step under way.
#[derive(Debug)]
pub(crate) struct Computing<'a> {
    processor: &'a Processor,
    began: Instant,
    /// Units of work that are done.
    done: u64,
}

/// Two matrices to multiply.
#[derive(Debug)]
pub(crate) struct Matrices(Tensor, Tensor);

impl Schedule {
    /// Makes the schedule of a network whose layers are in the order of the backward pass.
    pub(crate) fn new(layers: &[Layer]) -> Self {
        let whole: f64 = layers.iter().map(|layer| layer.work as f64).sum();
        let until = layers.iter().scan(0.0, |work, layer| {
            *work += layer.work as f64;
            Some(FORWARD + (1.0 - FORWARD) * *work / whole)
        });
        Self { forward: FORWARD, layers: until.collect() }
    }
}

impl Processor {
    /// Begins a step.
    pub(crate) fn begin(&self) -> Computing<'_> {
        Computing { processor: self, began: Instant::now(), done: 0 }
    }
}

impl Computing<'_> {
    /// Computes, or waits for the accelerator, until this share of the step is done. An accelerator goes on while the rank does other
    /// things, so it may be done at once.
    pub(crate) fn until(&mut self, share: f64) -> Result<()> {
        match self.processor {
            Processor::Accelerator { step } => {
                let end = self.began + step.mul_f64(share);
                let left = end.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    std::thread::sleep(left);
                }
            }
            Processor::Core { units, matrices } => {
                let wanted = (units * share).round() as u64;
                for _ in self.done..wanted {
                    matrices.multiply()?;
                }
                self.done = self.done.max(wanted);
            }
        }
        Ok(())
    }
}

impl Matrices {
    /// Makes two matrices of ones.
    pub(crate) fn new() -> Result<Self> {
        let ones = || Tensor::ones((SIDE, SIDE), candle_core::DType::F32, &Device::Cpu);
        Ok(Self(ones()?, ones()?))
    }

    /// Computes one unit of work.
    fn multiply(&self) -> Result<()> {
        std::hint::black_box(self.0.matmul(&self.1)?);
        Ok(())
    }

    /// Returns how long a unit takes, as the mean over `duration`.
    pub(crate) fn measure(&self, duration: Duration) -> Result<Duration> {
        let began = Instant::now();
        let mut units = 0;
        while began.elapsed() < duration {
            self.multiply()?;
            units += 1;
        }
        Ok(began.elapsed() / units.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlap::resnet50;

    #[test]
    fn the_schedule_of_resnet50_ends_with_the_whole_step() {
        let layers = resnet50::layers();
        let schedule = Schedule::new(&layers);
        assert_eq!(schedule.layers.len(), layers.len());
        assert!(
            schedule.layers.iter().fold(schedule.forward, |before, until| {
                assert!(before < *until);
                *until
            }) > 0.999_999
        );
        assert!((schedule.layers[53] - 1.0).abs() < 1e-9);
    }

    #[test]
    fn an_accelerator_goes_on_while_the_rank_does_other_things() {
        let accelerator = Processor::Accelerator { step: Duration::from_millis(40) };
        let mut computing = accelerator.begin();
        computing.until(0.5).unwrap();
        assert!(computing.began.elapsed() >= Duration::from_millis(20));
        std::thread::sleep(Duration::from_millis(40));
        let before = Instant::now();
        computing.until(1.0).unwrap();
        assert!(before.elapsed() < Duration::from_secs(60));
        assert!(computing.began.elapsed() >= Duration::from_millis(40));
    }

    #[test]
    fn a_core_computes_each_unit_once() {
        let core = Processor::Core { units: 10.0, matrices: Matrices::new().unwrap() };
        let mut computing = core.begin();
        for (share, done) in [(0.25, 3), (0.3, 3), (1.0, 10), (0.5, 10)] {
            computing.until(share).unwrap();
            assert_eq!(computing.done, done);
        }
    }
}
