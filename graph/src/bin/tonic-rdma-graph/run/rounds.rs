//! The turns of a run: all modes in turn, so that what else the machine does concerns all of them.

use tonic_rdma_commands::Failure;
use tonic_rdma_commands::statistics::median;
use tonic_rdma_graph::transfer::Mode;

use super::parts::{Parts, only};
use super::plan::Plan;
use super::reference::Reference;
use crate::control::{Described, Order, Report, Turn};
use crate::options::RunOptions;
use crate::output::ModeRow;

/// The least number of rounds that are measured, if there are as many steps.
const ROUNDS: u64 = 3;
/// The time that a turn of steps should take at most, in nanoseconds. The parts report after each turn, so a turn must end in time.
const TURN: u64 = 5_000_000_000;
/// The time that a turn of replays should take, in nanoseconds, so that the difference between the starts of two parts does not count.
const REPLAY: u64 = 250_000_000;
/// The least and the largest number of steps of a turn of replays.
const REPLAYS: (u64, u64) = (4, 20_000);

/// The turns, and what they showed.
#[derive(Debug)]
pub(crate) struct Rounds<'a> {
    plan: &'a Plan,
    reference: &'a Reference,
    /// Micro-batches of a step.
    batches: u64,
    steps: u64,
    /// The number of rounds, if the user chose it.
    asked: Option<u64>,
    /// The micro-batches of a turn that is checked: a step at least, and each set of inputs at least once.
    checked: u64,
    /// The number of the next micro-batch.
    next: u64,
    modes: Vec<Measured>,
    /// The first tensor that differs in each turn with errors.
    pub(crate) differences: Vec<String>,
}

/// What was measured of a mode.
#[derive(Clone, Debug)]
struct Measured {
    mode: Mode,
    /// Time of the first step, in nanoseconds.
    first: u64,
    /// The steps of a turn of replays.
    replays: u64,
    /// Time of a step in each round, in nanoseconds.
    steps: Vec<f64>,
    transfers: Vec<f64>,
    checked: u64,
    errors: u64,
}

impl<'a> Rounds<'a> {
    /// Makes the rounds of a run.
    pub(crate) fn new(options: &RunOptions, plan: &'a Plan, reference: &'a Reference) -> Self {
        let measured = |&mode| Measured {
            mode,
            first: 0,
            replays: 0,
            steps: Vec::new(),
            transfers: Vec::new(),
            checked: 0,
            errors: 0,
        };
        let modes = plan.modes.iter().map(measured).collect();
        Self {
            plan,
            reference,
            batches: options.micro_batches,
            steps: options.steps,
            asked: options.rounds,
            checked: options.micro_batches.max(plan.sets),
            next: 0,
            modes,
            differences: Vec::new(),
        }
    }

    /// Has the parts carry out all turns.
    pub(crate) async fn run(&mut self, parts: &mut Parts) -> Result<(), Failure> {
        // The mode that copies nothing is first, so that its first micro-batch is the one in which allocation sites are traced.
        let mut order: Vec<usize> = (0..self.modes.len()).collect();
        order.sort_by_key(|mode| self.plan.modes[*mode] != Mode::RdmaZerocp);
        for mode in order {
            self.warm_up(parts, mode).await?;
        }
        let rounds = self.rounds();
        for round in 0..rounds {
            // The steps are spread over the rounds.
            let steps = self.steps * (round + 1) / rounds - self.steps * round / rounds;
            for mode in 0..self.modes.len() {
                if steps > 0 {
                    // What is measured is not checked at the same time, because the check takes time of the step.
                    self.turn(parts, mode, self.checked, false, true).await?;
                    let nanos = self.turn(parts, mode, steps * self.batches, false, false).await?;
                    self.modes[mode].steps.push(nanos as f64 / steps as f64);
                }
                let replay = self.replay(parts, mode, self.modes[mode].replays).await?;
                self.modes[mode].transfers.push(replay);
            }
        }
        Ok(())
    }

    /// Returns the number of rounds over which the steps are spread.
    fn rounds(&self) -> u64 {
        let slowest = self.modes.iter().map(|mode| mode.first).max().unwrap_or(0).max(1);
        self.steps.div_ceil((TURN / slowest).max(1)).max(self.asked.unwrap_or(ROUNDS.min(self.steps)))
    }

    /// Runs the first micro-batches of a mode, which are compared, and replays, which are not.
    async fn warm_up(&mut self, parts: &mut Parts, mode: usize) -> Result<(), Failure> {
        self.turn(parts, mode, 1, false, true).await?;
        self.modes[mode].first = self.turn(parts, mode, self.batches, false, true).await?;
        // The first replay is slower than later ones.
        let mut steps = REPLAYS.0;
        for _ in 0..2 {
            let nanos = self.replay(parts, mode, steps).await?;
            // From a few steps follows a number that is far off, so it grows by and by.
            steps = ((REPLAY as f64 / nanos.max(1.0)) as u64).clamp(REPLAYS.0, 8 * steps);
        }
        let nanos = self.replay(parts, mode, steps).await?;
        self.modes[mode].replays = ((REPLAY as f64 / nanos.max(1.0)) as u64).clamp(REPLAYS.0, REPLAYS.1);
        Ok(())
    }

    /// Sends the tensors of the last micro-batch again, for this number of steps. Returns the time of a step, in nanoseconds.
    async fn replay(&mut self, parts: &mut Parts, mode: usize, steps: u64) -> Result<f64, Failure> {
        let nanos = self.turn(parts, mode, steps * self.batches, true, false).await?;
        Ok(nanos as f64 / steps as f64)
    }

    /// Has all parts run micro-batches, and returns the time of the slowest part.
    async fn turn(
        &mut self,
        parts: &mut Parts,
        mode: usize,
        count: u64,
        replay: bool,
        check: bool,
    ) -> Result<u64, Failure> {
        let turn = Turn { mode: self.modes[mode].mode, first: self.next, count, replay, check };
        self.next += count;
        parts.send_all(&Order::Run(turn)).await?;
        let done = parts.gather("run its micro-batches", only!(Report::Done(done) => done)).await?;
        let measured = &mut self.modes[mode];
        measured.checked += done.iter().map(|done| done.checked).sum::<u64>();
        measured.errors += done.iter().map(|done| done.errors).sum::<u64>();
        for (differs, content) in parts.differing.drain(..) {
            self.differences.push(self.reference.describe(self.plan, &differs, &content));
        }
        Ok(done.iter().map(|done| done.nanos).max().unwrap_or(0))
    }

    /// Returns the rows of the table.
    pub(crate) fn rows(self, described: &[Described]) -> Vec<ModeRow> {
        let micros = |nanos: Vec<f64>| nanos.into_iter().map(|nanos| nanos / 1000.0).collect::<Vec<f64>>();
        let row = |Measured { mode, steps, transfers, checked, errors, .. }| {
            let counts = described.iter().flat_map(|part| &part.modes).filter(|counts| counts.mode == mode);
            let (sent, sender_copies) =
                counts.fold((0, 0), |(sent, copied), counts| (sent + counts.sent, copied + counts.copied));
            let (steps, transfers) = (micros(steps), micros(transfers));
            ModeRow {
                mode,
                step_us: median(steps.iter().copied()),
                transfer_us: median(transfers.iter().copied()),
                step_us_of_rounds: steps,
                transfer_us_of_rounds: transfers,
                sent,
                sender_copies,
                sender_copies_per_tensor: if sent == 0 { 0.0 } else { sender_copies as f64 / sent as f64 },
                checked,
                errors,
            }
        };
        self.modes.into_iter().map(row).collect()
    }
}
