//! One rank of a training.

use std::io::Write;
use std::time::Instant;

use xxhash_rust::xxh3::Xxh3;

use crate::data::shards::{order, part};
use crate::data::{Data, Samples};
use crate::failure::Failure;
use crate::group::{Gradients, Group};
use crate::job::{Epoch, Spread, TrainJob, Training};
use crate::model::{Network, Optimiser, set, values};
use crate::processes::cores;

/// Samples of one forward pass of the test.
const TEST_BATCH: usize = 250;

/// One rank of a training under way.
struct Trainer<'a> {
    job: &'a TrainJob,
    group: &'a Group,
    network: Network,
    optimiser: Optimiser,
    gradients: Gradients,
    /// The sum of the losses of this rank's samples, for each step.
    losses: Vec<f64>,
    /// Seconds of each step, and of its wait for gradients.
    steps: Vec<f64>,
    waits: Vec<f64>,
}

/// Trains as one rank of the group. The result is the same on all ranks, but for the durations.
pub(crate) fn train(job: &TrainJob, group: &Group) -> Result<Training, Failure> {
    let data = Data::read(&job.data)?;
    if job.batch < group.size() || job.batch > data.train.len() {
        return Err(Failure::usage(format!(
            "--batch is {}, and has to be at least the number of ranks ({}) and at most the number of samples ({})",
            job.batch,
            group.size(),
            data.train.len()
        )));
    }
    let mut trainer = Trainer::new(job, group)?;
    let mut epochs = Vec::new();
    for number in 0..job.epochs {
        let epoch = trainer.epoch(number, &data)?;
        if group.rank() == 0 && job.test {
            report(number, &epoch);
        }
        epochs.push(epoch);
        if trainer.left() == 0 {
            break;
        }
    }
    trainer.finish(epochs)
}

/// Writes the progress of a long training.
fn report(number: usize, epoch: &Epoch) {
    let accuracy =
        epoch.accuracy.map_or_else(String::new, |share| format!(", accuracy {:.2} %", share * 100.0));
    // stderr may be closed. The result has the same values.
    let _ = writeln!(
        std::io::stderr(),
        "epoch {}: loss {:.4}{accuracy}, {:.0} samples/s",
        number + 1,
        epoch.loss,
        epoch.samples_per_s
    );
}

impl<'a> Trainer<'a> {
    fn new(job: &'a TrainJob, group: &'a Group) -> Result<Self, Failure> {
        // Each rank begins with weights of its own, and gets those of rank 0.
        let network = Network::random(job.model, job.seed.wrapping_add(group.rank() as u64))?;
        for parameter in network.parameters() {
            let mut weights = values(parameter)?;
            group.broadcast(&mut weights)?;
            set(parameter, &weights)?;
        }
        Ok(Self {
            job,
            group,
            optimiser: Optimiser::new(&network, job.rate, job.momentum)?,
            gradients: group.gradients(network.parameters().count())?,
            network,
            losses: Vec::new(),
            steps: Vec::new(),
            waits: Vec::new(),
        })
    }

    /// Returns the number of steps that the job still allows.
    fn left(&self) -> usize {
        let allowed = self.job.steps.map_or(usize::MAX, |steps| steps.saturating_add(self.job.warm_up));
        allowed.saturating_sub(self.losses.len())
    }

    /// Carries out one epoch. Samples that fill no batch are left out; each epoch leaves out others.
    fn epoch(&mut self, number: usize, data: &Data) -> Result<Epoch, Failure> {
        let order = order(data.train.len(), self.job.seed, number);
        let first = self.losses.len();
        for batch in order.chunks_exact(self.job.batch).take(self.left()) {
            let began = Instant::now();
            self.step(batch, &data.train)?;
            self.steps.push(began.elapsed().as_secs_f64());
        }
        // The losses of all ranks are added up once for each epoch, because nothing needs them earlier.
        let Some(losses) = self.losses.get_mut(first..) else {
            return Err(Failure::run("an epoch has no steps"));
        };
        self.group.sum(losses)?;
        losses.iter_mut().for_each(|loss| *loss /= self.job.batch as f64);
        let steps = losses.len();
        let loss = losses.iter().sum::<f64>() / steps.max(1) as f64;
        let seconds: f64 = self.steps.iter().skip(first).sum();
        Ok(Epoch {
            steps,
            loss,
            accuracy: if self.job.test { Some(self.accuracy(&data.test)?) } else { None },
            samples_per_s: (steps * self.job.batch) as f64 / seconds,
        })
    }

    /// Carries out one step with this rank's part of a batch.
    fn step(&mut self, batch: &[u32], samples: &Samples) -> Result<(), Failure> {
        let (ranks, rank) = (self.group.size(), self.group.rank());
        let share = batch.get(part(batch.len(), ranks, rank)).unwrap_or(&[]);
        let (pictures, classes) = samples.batch(share.iter().map(|sample| *sample as usize))?;
        // The mean over the ranks divides by their number. So the gradients are those of the mean loss of the batch, also if the
        // ranks have different numbers of samples.
        let factor = ranks as f64 / batch.len() as f64;
        let mut step = self.gradients.begin()?;
        let loss = self
            .network
            .gradients(&pictures, &classes, factor, |index, gradient| step.put(index, gradient))?;
        self.losses.push(loss);
        let computed = Instant::now();
        let means = step.finish()?;
        self.waits.push(computed.elapsed().as_secs_f64());
        for index in 0..means.len() {
            self.optimiser.step(&self.network, index, means.mean(index)?)?;
        }
        Ok(())
    }

    /// Returns the share of samples that the network puts into their class. Each rank tests a part of them.
    fn accuracy(&self, samples: &Samples) -> Result<f64, Failure> {
        let mut correct = 0;
        let mut share = part(samples.len(), self.group.size(), self.group.rank());
        while !share.is_empty() {
            let (pictures, classes) = samples.batch(share.by_ref().take(TEST_BATCH))?;
            correct += self.network.correct(&pictures, &classes)?;
        }
        let mut sum = [correct as f64];
        self.group.sum(&mut sum)?;
        Ok(sum.iter().sum::<f64>() / samples.len() as f64)
    }

    /// Checks that all ranks have the same weights, and makes the result.
    fn finish(self, epochs: Vec<Epoch>) -> Result<Training, Failure> {
        let hash = hash(&self.network)?;
        let hashes = self.group.gather(hash)?;
        if let Some(rank) = hashes.iter().position(|other| *other != hash) {
            return Err(Failure::run(format!(
                "rank {rank} ended with other weights than rank {}, and all must end with the same bits",
                self.group.rank()
            )));
        }
        let warm_up = self.job.warm_up.min(self.steps.len());
        let (steps, waits) = (self.steps.split_at(warm_up).1, self.waits.split_at(warm_up).1);
        Ok(Training {
            ranks: self.group.size(),
            cores: cores(),
            model: self.job.model,
            parameters: self.network.elements(),
            batch: self.job.batch,
            losses: self.losses,
            epochs,
            samples_per_s: (steps.len() * self.job.batch) as f64 / steps.iter().sum::<f64>(),
            step_ms: Spread::of(steps.to_vec()).median * 1e3,
            wait_ms: Spread::of(waits.to_vec()).median * 1e3,
            weights: format!("{hash:016x}"),
            plans: self.group.plans(),
            fusion: self.gradients.report(),
        })
    }
}

/// Returns a hash of the bits of all weights.
fn hash(network: &Network) -> Result<u64, Failure> {
    let mut hash = Xxh3::new();
    for parameter in network.parameters() {
        for weight in values(parameter)? {
            hash.update(&weight.to_bits().to_le_bytes());
        }
    }
    Ok(hash.digest())
}
