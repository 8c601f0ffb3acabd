//! What is fed into the steps, and what is tested.

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use tonic_rdma_graph::dataflow::KernelError;

use crate::array::{Array, Block};
use crate::data::fortunes::{self, Texts};
use crate::data::shards::reorder;
use crate::data::{Data, Samples};
use crate::failure::Failure;
use crate::model::{Network, set};
use crate::step::{Feed, Model, Shape, test_recurrent};

/// Samples of one forward pass of a test.
const TEST_BATCH: usize = 250;

/// Pictures or texts.
#[derive(Debug)]
pub(crate) enum Dataset {
    Pictures(Data),
    Texts(Texts),
}

/// The samples of the steps, in the order that follows from the seed.
#[derive(Debug)]
pub(crate) struct Feeder {
    dataset: Arc<Dataset>,
    shape: Shape,
    seed: u64,
    /// The samples in the order of an epoch. The memory is allocated before the first step: a step that begins an epoch makes the same
    /// allocations as any other step, so that the samples always come from the same allocation site.
    order: Vec<u32>,
    epoch: Option<usize>,
    /// The targets of the last samples that were fed, with their step.
    targets: Option<(u64, Array)>,
}

impl Dataset {
    /// Reads what a model is trained with.
    pub(crate) fn read(model: &Model, folder: &Path, length: usize) -> Result<Self, Failure> {
        Ok(match model {
            Model::Pictures(_) => Self::Pictures(Data::read(folder)?),
            Model::Recurrent(_) => Self::Texts(Texts::read(folder, length)?),
        })
    }

    /// Returns the number of samples to train with.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Pictures(data) => data.train.len(),
            Self::Texts(texts) => texts.train.len(),
        }
    }

    /// Returns the mean loss of at most `most` samples that are not trained with, and the share that is right: of classes, or of next
    /// characters.
    pub(crate) fn test(
        &self,
        model: &Model,
        variables: &[(String, Block<f32>)],
        most: usize,
    ) -> Result<(f64, f64), KernelError> {
        match (self, model) {
            (Self::Pictures(data), Model::Pictures(architecture)) => {
                let network = Network::random(*architecture, 0)?;
                for ((weight, bias), values) in network.layers().zip(variables.chunks(2)) {
                    for (parameter, (_, values)) in [weight, bias].into_iter().zip(values) {
                        set(parameter, values.values())?;
                    }
                }
                test_pictures(&network, &data.test, most)
            }
            (Self::Texts(texts), Model::Recurrent(model)) => {
                let texts = texts.test.get(..most.min(texts.test.len())).unwrap_or(&[]);
                let batches: Vec<_> = texts
                    .chunks(TEST_BATCH)
                    .map(|texts| fortunes::batch(texts.iter()))
                    .collect::<Result<_, _>>()?;
                test_recurrent(model, variables, batches.into_iter())
            }
            _ => Err("the samples are those of another model".into()),
        }
    }
}

fn test_pictures(network: &Network, samples: &Samples, most: usize) -> Result<(f64, f64), KernelError> {
    let number = most.min(samples.len());
    let (mut loss, mut correct) = (0.0, 0);
    for from in (0..number).step_by(TEST_BATCH) {
        let (pictures, classes) = samples.batch(from..number.min(from + TEST_BATCH))?;
        let (sum, right) = network.test(&pictures, &classes)?;
        loss += sum;
        correct += right;
    }
    let number = number.max(1) as f64;
    Ok((loss / number, correct as f64 / number))
}

impl Feeder {
    /// Makes the feeder of a job.
    pub(crate) fn new(dataset: Arc<Dataset>, shape: Shape, seed: u64) -> Self {
        let order = vec![0; dataset.len()];
        Self { dataset, shape, seed, order, epoch: None, targets: None }
    }

    /// Returns an input of a worker in a step.
    pub(crate) fn feed(&mut self, step: u64, worker: usize, feed: Feed) -> Result<Array, KernelError> {
        match (feed, self.targets.take()) {
            (Feed::Targets, Some((of, targets))) if of == step => Ok(targets),
            (feed, _) => {
                let (samples, targets) = self.batch(step, worker)?;
                match feed {
                    Feed::Samples => {
                        self.targets = Some((step, targets));
                        Ok(samples)
                    }
                    Feed::Targets => Ok(targets),
                }
            }
        }
    }

    /// Returns the samples of a worker in a step. Samples that fill no batch are left out; each epoch leaves out others.
    fn batch(&mut self, step: u64, worker: usize) -> Result<(Array, Array), KernelError> {
        let batch = self.shape.batch;
        let steps = self.dataset.len() / batch.max(1);
        if steps == 0 {
            return Err(format!("{} samples don't fill a batch of {batch}", self.dataset.len()).into());
        }
        let (epoch, step) = (step as usize / steps, step as usize % steps);
        if self.epoch != Some(epoch) {
            reorder(&mut self.order, self.seed, epoch);
            self.epoch = Some(epoch);
        }
        let share = self.shape.share(worker);
        let range = step * batch + share.start..step * batch + share.end;
        let which = self.order.get(range).unwrap_or(&[]).iter().map(|sample| *sample as usize);
        match &*self.dataset {
            Dataset::Pictures(data) => {
                let (pictures, classes): (Tensor, Tensor) = data.train.batch(which)?;
                Ok((Array::Tensor(pictures), Array::Tensor(classes)))
            }
            Dataset::Texts(texts) => {
                let (seen, next) = fortunes::batch(which.filter_map(|sample| texts.train.get(sample)))?;
                Ok((Array::Words(seen), Array::Words(next)))
            }
        }
    }
}
