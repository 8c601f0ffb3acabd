//! The measuring: short turns of each mode, again and again, so that drift affects all modes alike.

use std::time::Duration;

use indicatif::ProgressBar;
use tonic_rdma_commands::Failure;

use super::cells::{Planned, TrainingCell};
use super::load::Load;
use super::mode::TransferMode;
use super::options::{MAX_STEPS, ParameterServerOptions};
use crate::parameter_server::output::row::{TrainingRow, TrainingTally};
use crate::parameter_server::processes::session::Session;

/// Number of measured turns of each mode.
pub(crate) const ROUNDS: u32 = 3;

/// Measures cell after cell.
#[derive(Debug)]
pub(crate) struct TrainingMeter<'a> {
    options: &'a ParameterServerOptions,
    cores: Vec<usize>,
    progress: ProgressBar,
    /// The RDMA provider in use, if a mode needs one.
    pub(crate) provider: Option<String>,
    /// Whether all processes were pinned to the cores that they were given.
    pub(crate) pinned: bool,
    /// Number of tensors whose every byte was checked, and of tensors whose stamps were checked.
    pub(crate) every_byte: u64,
    pub(crate) stamps: u64,
}

impl<'a> TrainingMeter<'a> {
    pub(crate) fn new(options: &'a ParameterServerOptions, cores: Vec<usize>, progress: ProgressBar) -> Self {
        Self { options, cores, progress, provider: None, pinned: true, every_byte: 0, stamps: 0 }
    }

    /// Measures every cell that has the memory for it, and returns a row for each mode.
    pub(crate) async fn run(&mut self, planned: &[Planned]) -> Result<Vec<TrainingRow>, Failure> {
        let measured = planned.iter().filter(|it| it.skipped.is_none());
        let turns: u64 = measured.map(|it| u64::from(ROUNDS) * it.loads.len() as u64 + 2).sum();
        self.progress.set_length(turns * self.options.modes().len() as u64);
        let mut rows = Vec::new();
        for Planned { cell, loads, skipped } in planned {
            match skipped {
                Some(reason) => {
                    for load in loads {
                        let modes = self.options.modes().into_iter();
                        rows.extend(modes.map(|mode| TrainingRow::skipped(mode, *cell, *load, reason)));
                    }
                }
                None => rows.extend(self.cell(*cell, loads).await?),
            }
        }
        Ok(rows)
    }

    /// Measures a cell with each of its loads, in the same processes.
    async fn cell(&mut self, cell: TrainingCell, loads: &[Load]) -> Result<Vec<TrainingRow>, Failure> {
        self.progress.set_message(format!("{}  starting", cell.label()));
        let mut session = Session::start(cell, self.options, &self.cores).await?;
        self.pinned &= session.is_pinned();
        self.provider = self.provider.take().or(session.provider().map(str::to_owned));
        let modes = self.options.modes();
        for mode in &modes {
            self.check_every_byte(&mut session, *mode, cell).await?;
        }
        let mut rows = Vec::new();
        for load in loads {
            rows.extend(self.load(&mut session, cell, *load).await?);
        }
        for mode in &modes {
            self.check_every_byte(&mut session, *mode, cell).await?;
        }
        Ok(rows)
    }

    async fn load(
        &mut self,
        session: &mut Session,
        cell: TrainingCell,
        load: Load,
    ) -> Result<Vec<TrainingRow>, Failure> {
        let modes = self.options.modes();
        let mut tallies = Vec::new();
        for mode in &modes {
            let steps = self.steps(session, *mode, load).await?;
            tallies.push(TrainingTally::new(*mode, cell, load, steps));
        }
        for round in 0..ROUNDS as usize {
            for turn in 0..modes.len() {
                // Each round begins with another mode.
                let tally = &mut tallies[(turn + round) % modes.len()];
                self.announce(tally.mode(), cell, load);
                let outcome = session.turn(tally.mode(), tally.steps(), false, load.computing()).await?;
                self.stamps += outcome.checked;
                tally.add(outcome);
            }
        }
        Ok(tallies.into_iter().map(TrainingTally::row).collect())
    }

    fn announce(&self, mode: TransferMode, cell: TrainingCell, load: Load) {
        let load = load.label().map(|load| format!(", {load}")).unwrap_or_default();
        self.progress.set_message(format!("{}{load}  {mode}", cell.label()));
        self.progress.inc(1);
    }

    /// Makes a mini-batch outside the measured time. Receivers check every byte of it. It also warms the memory.
    async fn check_every_byte(
        &mut self,
        session: &mut Session,
        mode: TransferMode,
        cell: TrainingCell,
    ) -> Result<(), Failure> {
        self.announce(mode, cell, Load::NONE);
        self.every_byte += session.turn(mode, 1, true, Load::NONE.computing()).await?.checked;
        Ok(())
    }

    /// Returns the number of mini-batches of a turn: the number of the command line, or as many as fit into the time.
    async fn steps(&mut self, session: &mut Session, mode: TransferMode, load: Load) -> Result<u32, Failure> {
        if let Some(steps) = self.options.steps {
            return Ok(steps);
        }
        // Variants of the content alternate. Two mini-batches warm two of them, and the measured one is not the first.
        let outcome = session.turn(mode, 2, false, load.computing()).await?;
        self.stamps += outcome.checked;
        let longest = outcome.nanos.iter().filter_map(|nanos| nanos.last()).max();
        let longest = Duration::from_nanos(longest.copied().unwrap_or(1).max(1));
        let turn = self.options.duration / ROUNDS;
        Ok(((turn.as_secs_f64() / longest.as_secs_f64()).round() as u32).clamp(1, MAX_STEPS))
    }
}
