//! One rank of a training, the group of all ranks, and the result.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tonic_rdma_collective::{CollectiveError, Communicator, Fusion, Launch, Number};
use tonic_rdma_commands::output::note;
use tonic_rdma_commands::plot::{Axis, Content, Plot, Scale, Series};
use tonic_rdma_commands::statistics::median;
use tonic_rdma_commands::table::grid;
use tonic_rdma_commands::{Context as _, Failure, units};

use crate::array::{Array, Block, Error};
use crate::checkpoint::{Checkpoint, Folder};
use crate::data::{Data, SAME_SAMPLES, part, reorder};
use crate::layer::{Gradients, Layer, cross_entropy};
use crate::network::{Model, TABLE, rows};
use crate::options::{Options, cores};
use crate::step::CLIP;
use crate::variables::{Gradient, Variables, sum_of_rows};

/// One rank of a training under way.
struct Trainer<'a> {
    job: &'a Options,
    group: &'a Group,
    data: Data,
    layers: Vec<Layer>,
    variables: Arc<Variables>,
    /// Averages the gradients over all ranks in buckets, while the rank computes further gradients.
    fusion: Fusion<f32>,
    /// The mean loss of the samples of each step, and the number of steps in which it is that of all ranks. In
    /// later steps it is this rank's part.
    losses: Vec<f64>,
    summed: usize,
    /// Where rank 0 writes checkpoints, and the step of the latest one.
    folder: Option<Folder>,
    saved: usize,
    /// Seconds of each step that this process ran, and of its wait for gradients.
    steps: Vec<f64>,
    waits: Vec<f64>,
}

/// Trains as one rank of the group. The result is the same on all ranks, but for the durations.
pub(crate) fn train(job: &Options, group: &Group) -> Result<Training, Error> {
    let data = job.samples()?;
    if let Some(other) = group.differs("the comparison of the samples", data.hash())? {
        let rank = group.rank();
        return Err(format!("rank {other} has other samples than rank {rank}: {SAME_SAMPLES}").into());
    }
    let (ranks, samples) = (group.size(), data.train.len());
    if job.batch < ranks || job.batch > samples {
        return Err(Failure::usage(format!(
            "--batch is {}, and has to be at least the number of ranks ({ranks}) and at most the number of samples ({samples})",
            job.batch,
        ))
        .into());
    }
    let mut trainer = Trainer::new(job, group, data)?;
    let mut epochs = Vec::new();
    for number in trainer.losses.len() / (samples / job.batch)..job.epochs {
        if trainer.remaining_steps() == 0 {
            break;
        }
        let epoch = trainer.epoch(number)?;
        if group.rank() == 0 {
            let Epoch { loss, accuracy, samples_per_s, .. } = epoch;
            let percent = accuracy * 100.0;
            note(&format!(
                "epoch {}: loss {loss:.4}, accuracy {percent:.2} %, {samples_per_s:.0} samples/s",
                number + 1
            ));
        }
        epochs.push(epoch);
    }
    trainer.save()?;
    trainer.finish(epochs)
}

impl<'a> Trainer<'a> {
    fn new(job: &'a Options, group: &'a Group, data: Data) -> Result<Self, Error> {
        // Each rank begins with weights of its own, and gets those of rank 0: new ones, or those of a checkpoint.
        let first = Checkpoint {
            losses: Vec::new(),
            variables: job.model.variables(job.seed.wrapping_add(group.rank() as u64)),
        };
        let folder = match group.rank() {
            0 => Folder::open(job, group.size(), data.hash())?,
            _ => None,
        };
        let found = folder.as_ref().map_or(Ok(None), |folder| folder.begin(job.resume))?;
        let Checkpoint { mut losses, mut variables } = found.unwrap_or(first);
        let mut steps = [losses.len() as u64];
        group.share(&mut steps[..])?;
        losses.resize(usize::try_from(steps[0])?, 0.0);
        if !losses.is_empty() {
            group.share(losses.as_mut_slice())?;
        }
        for variable in &mut variables {
            group.share(variable.values.as_mut_slice())?;
            group.share(variable.velocities.as_mut_slice())?;
        }
        Ok(Self {
            job,
            group,
            data,
            layers: job.model.layers(),
            variables: Variables::new(variables, job.rate(), job.momentum, steps[0])?,
            fusion: Fusion::builder(&group.communicator).build()?,
            summed: losses.len(),
            saved: losses.len(),
            losses,
            folder,
            steps: Vec::new(),
            waits: Vec::new(),
        })
    }

    /// Returns the number of steps that the job still allows.
    fn remaining_steps(&self) -> usize {
        self.job.steps.unwrap_or(usize::MAX).saturating_sub(self.losses.len())
    }

    /// Carries out one epoch, or what a checkpoint leaves of it. Samples that fill no batch are left out; each
    /// epoch leaves out others.
    fn epoch(&mut self, number: usize) -> Result<Epoch, Error> {
        let mut order = vec![0; self.data.train.len()];
        reorder(&mut order, self.job.seed, number);
        let (first, ran) = (number * (order.len() / self.job.batch), self.steps.len());
        let batches = order.chunks_exact(self.job.batch).skip(self.losses.len() - first);
        for batch in batches.take(self.remaining_steps()) {
            let began = Instant::now();
            self.step(batch).context(format!(
                "rank {}: step {} failed",
                self.group.rank(),
                self.losses.len()
            ))?;
            self.steps.push(began.elapsed().as_secs_f64());
            if self.losses.len().is_multiple_of(self.job.checkpoint_every) {
                self.save()?;
            }
        }
        self.sum_losses()?;
        let losses = self.losses.get(first..).unwrap_or_default();
        let (steps, loss) = (losses.len(), losses.iter().sum::<f64>() / losses.len().max(1) as f64);
        let accuracy = self.accuracy()?;
        Ok(Epoch { steps, loss, accuracy, samples_per_s: self.samples_per_s(ran) })
    }

    /// Returns the samples a second of all ranks, from the step on that this process ran after `ran` others.
    fn samples_per_s(&self, ran: usize) -> f64 {
        let steps = self.steps.get(ran..).unwrap_or_default();
        let seconds: f64 = steps.iter().sum();
        if seconds > 0.0 { (steps.len() * self.job.batch) as f64 / seconds } else { 0.0 }
    }

    /// Makes the losses those of all ranks. This is done at the end of an epoch and for a checkpoint, because
    /// nothing needs them earlier.
    fn sum_losses(&mut self) -> Result<(), Failure> {
        self.group.sum(self.losses.get_mut(self.summed..).unwrap_or_default())?;
        self.summed = self.losses.len();
        Ok(())
    }

    /// Writes a checkpoint, if the job has checkpoints and this step has none. All ranks take part.
    fn save(&mut self) -> Result<(), Error> {
        let step = self.losses.len();
        if self.job.checkpoint.is_none() || self.saved == step {
            return Ok(());
        }
        self.sum_losses()?;
        self.saved = step;
        let Some(folder) = &self.folder else { return Ok(()) };
        self.variables.settle(step as u64)?;
        let names = self.job.model.shapes().into_iter().map(|(name, _)| self.variables.get(&name));
        let variables = names.collect::<Result<_, _>>()?;
        folder.save(&Checkpoint { losses: self.losses.clone(), variables })?;
        note(&format!("step {step}: a checkpoint is written"));
        Ok(())
    }

    /// Carries out one step with this rank's part of a batch.
    fn step(&mut self, batch: &[u32]) -> Result<(), Error> {
        let (ranks, rank, number) = (self.group.size(), self.group.rank(), self.losses.len() as u64);
        let share = batch.get(part(batch.len(), ranks, rank)).unwrap_or(&[]);
        let texts = self.job.model.reads_texts();
        let (samples, targets) = self.data.train.batch(share.iter().map(|sample| *sample as usize))?;
        let targets = targets.into_tensor()?.flatten_all()?;
        let table = if texts { Some(self.variables.assign(TABLE, number)?) } else { None };
        let mut values = match &table {
            Some(table) => rows(table.as_floats()?, samples.as_words()?)?.into_tensor()?,
            None => samples.clone().into_tensor()?,
        };
        // The mean over the ranks divides by their number. So the gradients are those of the mean loss of the
        // batch, also if the ranks have different numbers of samples.
        let factor = (ranks * share.len()) as f32 / batch.len() as f32;
        let weights = self.job.model.weights(&targets, factor)?;
        let mut step = self.fusion.step()?;
        let mut tapes = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let variables = layer.variables.iter();
            let variables = variables.map(|(name, _)| self.variables.assign(name, number)?.into_tensor());
            // The gradient of the pictures is not needed.
            let gradients = if index == 0 && !texts { Gradients::Variables } else { Gradients::All };
            let (output, tape) = layer.forward(&values, variables.collect::<Result<_, _>>()?, gradients)?;
            values = output;
            tapes.push(tape);
        }
        let (loss, mut gradient) = cross_entropy(&values, &targets, &weights)?;
        self.losses.push(f64::from(loss) / ranks as f64);
        // Gradients of texts have the same bound as with parameter servers, where they add up.
        let array = |gradient: Tensor| match texts {
            true => Array::clipped(&gradient, CLIP * ranks as f32),
            false => Array::take(gradient),
        };
        for (layer, tape) in self.layers.iter().zip(&tapes).rev() {
            let mut gradients = tape.backward(&gradient)?.into_iter();
            for ((name, _), gradient) in layer.variables.iter().zip(gradients.by_ref()) {
                step.put(name, array(gradient)?.as_floats()?.values())?;
            }
            gradient = gradients.next().unwrap_or(gradient);
        }
        if let Some(table) = table {
            let (table, of_rows) = (table.as_floats()?, array(gradient)?);
            let columns = table.dims().last().copied().unwrap_or(1);
            let of_rows = [(samples.as_words()?.clone(), of_rows.as_floats()?.clone())];
            step.put(TABLE, &sum_of_rows(&of_rows, table.values().len(), columns))?;
        }
        let computed = Instant::now();
        let means = step.finish().wait()?;
        self.waits.push(computed.elapsed().as_secs_f64());
        for (name, mean) in means.iter() {
            let mean = Block::new(&[mean.len()], mean.to_vec())?;
            self.variables.push(name, number, Gradient::Sum(vec![mean]))?;
        }
        Ok(())
    }

    /// Returns the share of samples that the network puts into their class. Each rank tests a part of them.
    fn accuracy(&self) -> Result<f64, Error> {
        self.variables.settle(self.losses.len() as u64)?;
        let share = part(self.data.test.len(), self.group.size(), self.group.rank());
        let mut sums = self.job.model.test(&self.variables.values()?, &self.data.test, share)?;
        self.group.sum(&mut sums)?;
        let [_, correct, number] = sums;
        Ok(correct / number)
    }

    /// Checks that all ranks have the same weights, and makes the result.
    fn finish(self, epochs: Vec<Epoch>) -> Result<Training, Error> {
        self.variables.settle(self.losses.len() as u64)?;
        let (hash, rank) = (self.variables.hash()?, self.group.rank());
        if let Some(other) = self.group.differs("the comparison of all ranks", hash)? {
            return Err(format!(
                "rank {other} ended with other weights than rank {rank}, and all must end with the same bits"
            )
            .into());
        }
        let samples_per_s = self.samples_per_s(0);
        Ok(Training {
            ranks: self.group.size(),
            cores: cores(),
            model: self.job.model,
            parameters: self.job.model.parameters(),
            batch: self.job.batch,
            losses: self.losses,
            epochs,
            samples_per_s,
            step_ms: median(self.steps.iter().copied()) * 1e3,
            wait_ms: median(self.waits.iter().copied()) * 1e3,
            weights: format!("{hash:016x}"),
            plans: self.group.communicator.plans().to_string(),
            fusion: format!(
                "buckets of {}\nof {} steps, as rank {rank} saw them: {}",
                units::size(self.fusion.bucket_bytes() as u64),
                self.steps.len(),
                self.fusion.overlap()
            ),
        })
    }
}

/// The variables by which launchers tell a process its rank.
const LAUNCHERS: [&str; 4] = ["RDMA_COLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];
/// Those of Hydra, which are there together: srun sets one of them alone.
const HYDRA: [&str; 2] = ["PMI_RANK", "PMI_SIZE"];

/// All ranks, as one of them sees them.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) communicator: Communicator,
    /// The connections to the other ranks run on it.
    _runtime: Runtime,
}

/// Returns whether a launcher started this process as one of several ranks.
pub(crate) fn is_launched() -> Result<bool, Failure> {
    let is_set = |name: &&str| std::env::var_os(name).is_some();
    if !LAUNCHERS.iter().any(is_set) && !HYDRA.iter().all(is_set) {
        return Ok(false);
    }
    // An interactive shell of Slurm is the only task of its step.
    Ok(launch()?.size() > 1 || std::env::var_os("SLURM_PROCID").is_none())
}

fn launch() -> Result<Launch, Failure> {
    Launch::from_env().context("can't learn the rank of this process")
}

impl Group {
    /// Meets the other ranks.
    pub(crate) fn connect() -> Result<Self, Failure> {
        let launch = launch()?;
        let (rank, size) = (launch.rank(), launch.size());
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("can't make a runtime")?;
        let communicator = runtime.block_on(Communicator::builder().launch(launch).connect());
        let communicator =
            communicator.context(format!("rank {rank} of {size} can't meet the other ranks"))?;
        Ok(Self { communicator, _runtime: runtime })
    }

    pub(crate) fn rank(&self) -> usize {
        self.communicator.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Makes each value the sum of all ranks, added up in their order: the bits don't depend on how many values
    /// are added up at once.
    fn sum(&self, values: &mut [f64]) -> Result<(), Failure> {
        if values.is_empty() {
            return Ok(());
        }
        let mut all = vec![0.0; self.size() * values.len()];
        if let Some(own) = all.chunks_exact_mut(values.len()).nth(self.rank()) {
            own.copy_from_slice(values);
        }
        self.done("the sum of results", self.communicator.all_gather(all.as_mut_slice()).wait())?;
        for (index, value) in values.iter_mut().enumerate() {
            *value = all.iter().skip(index).step_by(all.len() / self.size()).sum();
        }
        Ok(())
    }

    /// Gives all ranks the elements of rank 0.
    fn share<T: Number>(&self, elements: &mut [T]) -> Result<(), Failure> {
        let shared = self.communicator.broadcast(elements, 0).wait();
        self.done("the broadcast of the first values", shared).map(drop)
    }

    /// Returns a rank whose hash differs from that of this rank.
    fn differs(&self, what: &str, hash: u64) -> Result<Option<usize>, Failure> {
        let mut hashes = vec![0; self.size()];
        if let Some(own) = hashes.get_mut(self.rank()) {
            *own = hash;
        }
        self.done(what, self.communicator.all_gather(hashes.as_mut_slice()).wait())?;
        Ok(hashes.iter().position(|other| *other != hash))
    }

    /// Names this rank in the failure of an operation.
    pub(crate) fn done<T>(
        &self,
        what: &str,
        result: Result<T, impl Into<CollectiveError>>,
    ) -> Result<T, Failure> {
        result.map_err(Into::into).context(format!("rank {}: {what} failed", self.rank()))
    }
}

/// The result of a training. It travels between processes as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Training {
    pub(crate) ranks: usize,
    pub(crate) cores: usize,
    pub(crate) model: Model,
    pub(crate) parameters: usize,
    /// Samples of one step, of all ranks together.
    pub(crate) batch: usize,
    /// The mean loss of the samples of each step, over all ranks.
    pub(crate) losses: Vec<f64>,
    pub(crate) epochs: Vec<Epoch>,
    /// Samples a second of all ranks together, over all steps.
    pub(crate) samples_per_s: f64,
    /// The median duration of a step at rank 0, and of its wait for gradients after its own computation.
    pub(crate) step_ms: f64,
    pub(crate) wait_ms: f64,
    /// A hash of all weights at the end, equal on all ranks.
    pub(crate) weights: String,
    /// The plans and the buckets that the communicator chose.
    pub(crate) plans: String,
    pub(crate) fusion: String,
}

/// The result of one epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    pub(crate) steps: usize,
    /// The mean loss of the steps.
    pub(crate) loss: f64,
    /// The share of the test samples that the network puts into their class.
    pub(crate) accuracy: f64,
    pub(crate) samples_per_s: f64,
}

impl Training {
    pub(crate) fn text(&self) -> String {
        let row = |(number, epoch): (usize, &Epoch)| {
            vec![
                (number + 1).to_string(),
                epoch.steps.to_string(),
                format!("{:.4}", epoch.loss),
                percent(epoch.accuracy),
                format!("{:.0}", epoch.samples_per_s),
            ]
        };
        let rows = self.epochs.iter().enumerate().map(row).collect();
        let table = grid(&["epoch", "steps", "loss", "test accuracy", "samples/s"], [rows]);
        format!(
            "{} of {} parameters, {}, {} samples a step\n{table}\n\
             A step takes {:.2} ms; {:.2} ms of it rank 0 waits for gradients, after its own backward pass (medians).\n\
             The weights of all ranks are equal, bit by bit: {}.\n{}{}",
            self.model.title(),
            self.parameters,
            machine(self.ranks, self.cores),
            self.batch,
            self.step_ms,
            self.wait_ms,
            self.weights,
            paragraph(&self.plans),
            paragraph(&self.fusion),
        )
    }
}

/// Returns the plot of a training: the loss by step.
pub(crate) fn losses(training: &Training) -> Plot<'static> {
    let points = training.losses.iter().enumerate().map(|(step, loss)| (step as f64, *loss));
    let lines = vec![Series::new(ranks(training.ranks), 0, points.collect())];
    plot("Loss of each step (lower is better)", "step", "cross entropy", lines, false)
}

/// Makes a plot of lines over axes that begin at zero.
pub(crate) fn plot(
    title: &'static str,
    x: &'static str,
    y: &'static str,
    lines: Vec<Series<(f64, f64)>>,
    marks: bool,
) -> Plot<'static> {
    let [x, y] = [x, y].map(|name| Axis { name, scale: Scale::Linear });
    Plot { title, y, content: Content::Lines { x, lines, marks } }
}

fn machine(number: usize, cores: usize) -> String {
    // A launcher may keep each rank on one core. The process then sees this core alone.
    let plural = if cores == 1 { "" } else { "s" };
    format!("{}, rank 0 on {cores} core{plural}", ranks(number))
}

fn ranks(number: usize) -> String {
    if number == 1 { "1 rank".to_owned() } else { format!("{number} ranks") }
}

/// Returns a share in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Returns text as lines of their own, or nothing.
fn paragraph(text: &str) -> String {
    if text.trim().is_empty() { String::new() } else { format!("\n{}\n", text.trim_end()) }
}
