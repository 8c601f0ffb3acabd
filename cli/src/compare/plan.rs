//! The plan of a run: modes, cells (each is one combination of load, calls in flight, and rate), the order of
//! trials, and the time of each mode in each cell, such that a run without `--duration` ends in time.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::{Failure, List, Named as _, units};

use crate::compare::modes::mode::{Contender, Mode};
use crate::compare::operations::room;
use crate::compare::options::{CompareOptions, Conditions};
use crate::measure::machine::{available, lacking};
use crate::measure::settings::Http2;
use crate::workload::Workload;

/// The cells of a run without `--sizes` and `--inflight`: small calls alone and many at once, then one large
/// call at a time. Each is a payload, calls in flight, and whether the cell is in a usual run, in one with
/// `--quick`, with `--defaults`, and with both. README has the figures of a program that chooses nothing for
/// the cells of `--defaults`.
const PRESETS: [(u64, usize, [bool; 4]); 10] = [
    (64, 1, [true; 4]),
    (64, 32, [true, true, false, false]),
    (64, 64, [false, false, true, true]),
    (8 << 10, 64, [true, true, false, false]),
    (8 << 10, 512, [true, false, false, false]),
    (64 << 10, 1, [true; 4]),
    (1 << 20, 1, [true; 4]),
    (4 << 20, 1, [true, false, true, false]),
    (16 << 20, 1, [true; 4]),
    (64 << 20, 1, [true, false, false, false]),
];

/// Returns the cells of a run without `--sizes` and `--inflight`.
fn preset(defaults: bool, quick: bool) -> Vec<Cell> {
    let column = 2 * usize::from(defaults) + usize::from(quick);
    let cells = PRESETS.iter().filter(|(_, _, is_in)| is_in[column]);
    cells.map(|(bytes, inflight, _)| Cell::closed(*bytes, *inflight)).collect()
}

/// The rates of `--defaults`, beside its cells, and whether a run with `--quick` has them too. Most services
/// get so many calls a second. Without `--modes` these modes take part.
const RATES: [(f64, bool); 3] = [(1000.0, true), (10_000.0, false), (30_000.0, false)];
const RATE_MODES: [Mode; 4] = [Mode::GrpcTcp, Mode::GrpcUds, Mode::GrpcRdma, Mode::GrpcNative];

/// The largest number of operations of one trial of an open loop. The times of all of them are drawn before
/// the trial begins.
pub(crate) const MAX_ARRIVALS: f64 = 1e6;

/// The payload of an open loop without `--sizes`. It is small, because a large payload at a high rate would
/// be too much.
const OPEN_LOOP_LOAD: Workload = Workload::Size(64);

/// The modes of `--connections` without `--modes`, and the payload without `--sizes`.
const CONNECTION_MODES: [Mode; 3] = [Mode::GrpcTcp, Mode::GrpcRdma, Mode::GrpcNative];
const CONNECTION_SIZE: u64 = 64;

/// The plan of a whole run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Modes in the order of the table.
    pub(crate) modes: Vec<Mode>,
    /// The modes, each with the settings that it is measured with.
    pub(crate) contenders: Vec<Contender>,
    /// Cells in the order of the table.
    pub(crate) cells: Vec<Cell>,
    /// Numbers of connections to measure, without which each mode has one connection.
    pub(crate) connections: Vec<usize>,
    /// The direction of payloads.
    pub(crate) direction: Direction,
    /// Time for each mode in each cell.
    pub(crate) duration: Duration,
    /// What the run measures afterwards, in an open loop, with other modes.
    pub(crate) rates: Option<Box<Self>>,
}

impl Plan {
    /// Makes the plan of the run that `options` ask for, if the machine has the memory for it.
    pub(crate) fn new(options: &CompareOptions) -> Result<Self, Failure> {
        let direction = options.direction;
        check_direction(direction, options)?;
        let runtime = Conditions::of(options).runtime;
        let usual = || match options.connections {
            None => Mode::default_list(options.defaults, runtime),
            Some(_) => CONNECTION_MODES.to_vec(),
        };
        let mut modes = options.modes.clone().map_or_else(usual, |list| list.0);
        if options.server.is_some() {
            let of_one_host = modes.iter().find(|mode| mode.is_of_one_host());
            if let Some(mode) = of_one_host.filter(|_| options.modes.is_some()) {
                return Err(Failure::usage(format!(
                    "--modes {mode}: it is for processes of one host, so --server can't measure it"
                )));
            }
            modes.retain(|mode| !mode.is_of_one_host());
        }
        if let Some(mode) = modes.iter().find(|mode| !mode.is_for(runtime)) {
            return Err(Failure::usage(format!(
                "--modes {mode} is for runtimes of one thread (--runtime idle-polling or current-thread): in {runtime} \
                 threads sleep"
            )));
        }
        modes.retain(|mode| direction.is_for(*mode));
        let cells = cells(options);
        let rate_modes = match options.modes {
            Some(_) => modes.clone(),
            None => RATE_MODES.into_iter().filter(|mode| modes.contains(mode)).collect(),
        };
        let rates = rate_cells(options);
        check_limits(&cells, &modes)?;
        let connections = options.connections.map(counts).unwrap_or_default();
        let most = connections.last().copied().unwrap_or(1);
        check_connections(options, &modes)?;
        let together = |cell: &Cell| Cell { inflight: cell.inflight.saturating_mul(most), ..*cell };
        // Before the measuring.
        fits(&cells.iter().map(together).collect::<Vec<_>>(), &modes, direction, available())?;
        let contenders = |modes: &[Mode]| Contender::all(modes, &options.http2.0);
        let (count, at_rates) = (contenders(&modes).len(), contenders(&rate_modes).len());
        let usual = || match options.connections {
            None => mode_time(&[(&cells[..], count), (&rates, at_rates)], options.quick),
            Some(_) => trial_time(2 * connections.len() * cells.len() * count, options.quick),
        };
        let duration = options.duration.unwrap_or_else(usual);
        let part = |modes: Vec<Mode>, cells, rates| {
            let (contenders, connections) = (contenders(&modes), connections.clone());
            Self { modes, contenders, cells, connections, direction, duration, rates }
        };
        let rates = (!rates.is_empty()).then(|| Box::new(part(rate_modes, rates, None)));
        Ok(part(modes, cells, rates))
    }

    /// Returns the settings of HTTP/2 that the server needs.
    pub(crate) fn http2(&self, options: &CompareOptions) -> Vec<Http2> {
        let mut settings = options.http2.0.clone();
        if self.modes.contains(&Mode::GrpcTcpTuned) && !settings.contains(&Http2::TUNED) {
            settings.push(Http2::TUNED);
        }
        settings
    }

    /// Returns whether any mode needs RDMA.
    pub(crate) fn uses_rdma(&self) -> bool {
        self.parts().any(|part| part.modes.iter().any(|mode| mode.uses_rdma()))
    }

    /// Refuses cells that need more memory than there is.
    pub(crate) fn fits(&self, available: Option<u64>) -> Result<(), Failure> {
        fits(&self.cells, &self.modes, self.direction, available)
    }

    /// Describes the plan in a line.
    pub(crate) fn describe(&self) -> String {
        let part = |part: &Self| {
            let modes: Vec<&str> = part.modes.iter().map(|mode| mode.name()).collect();
            let cells: Vec<String> = part.cells.iter().map(|cell| cell.label()).collect();
            format!("{} at {}", modes.join(", "), cells.join(", "))
        };
        self.parts().map(part).collect::<Vec<_>>().join("; ")
    }

    /// Refuses `--at-least` for a run that has nothing to compare.
    pub(crate) fn check_ratio(&self, options: &CompareOptions) -> Result<(), Failure> {
        let Some(ratio) = options.at_least else { return Ok(()) };
        let comparable = |mode: Mode| self.cells.iter().any(|cell| cell.beyond(mode).is_none());
        let reason = if !self.modes.contains(&Mode::GrpcTcp) {
            "--modes lacks grpc-tcp, which others are compared with"
        } else if !self.modes.iter().any(|mode| mode.uses_rdma()) {
            "--modes has no mode that uses RDMA"
        } else if self.is_open_loop() {
            "with --rate all modes have the throughput that is offered"
        } else if !comparable(Mode::GrpcTcp) {
            "grpc-tcp can carry none of the payloads"
        } else {
            return Ok(());
        };
        Err(Failure::usage(format!("--at-least {ratio}: {reason}")))
    }

    /// Returns the parts of the run. An open loop has a runtime of its own, and so a server and connections of
    /// its own.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |part| part.rates.as_deref())
    }

    /// Returns the largest number of connections of a mode at a time.
    pub(crate) fn most_connections(&self) -> u32 {
        self.connections.last().map_or(1, |most| u32::try_from(*most).unwrap_or(u32::MAX))
    }

    /// Returns the bytes of the longest payload of a call.
    pub(crate) fn longest_payload(&self) -> u64 {
        self.cells.iter().map(|cell| cell.load.largest_message()).max().unwrap_or(0)
    }

    /// Returns whether the run is an open loop, in which operations begin when they are due.
    pub(crate) fn is_open_loop(&self) -> bool {
        self.cells.iter().any(|cell| cell.rate.is_some())
    }

    /// Returns the length of one mode's trial. It is short compared with the drift of a machine, and long
    /// compared with the change of modes. Trials of an open loop are long, so that queues can build up, but
    /// not longer than their schedule has room for.
    pub(crate) fn slice(&self, cell: Cell) -> Duration {
        match cell.rate {
            None => (self.duration / 8).clamp(Duration::from_millis(20), Duration::from_millis(200)),
            Some(rate) => {
                // A whole number of operations, so that the offered rate is exact even if it is low.
                let third = self.duration.as_secs_f64() / f64::from(MIN_ROUNDS);
                Duration::from_secs_f64((rate * third).ceil().clamp(1.0, MAX_ARRIVALS) / rate)
            }
        }
    }

    /// Returns the number of trials of each mode in a cell.
    pub(crate) fn rounds(&self, cell: Cell) -> u32 {
        let trials = self.duration.as_secs_f64() / self.slice(cell).as_secs_f64();
        (trials.ceil() as u32).max(MIN_ROUNDS)
    }

    /// Returns the number of trials of all modes in all cells.
    pub(crate) fn trials(&self) -> u64 {
        if let [_, several @ ..] = self.connections.as_slice() {
            // One connection has one trial, and several have two.
            return (1 + 2 * several.len() as u64) * (self.cells.len() * self.contenders.len()) as u64;
        }
        let rounds: u64 = self.cells.iter().map(|cell| u64::from(self.rounds(*cell))).sum();
        rounds * self.contenders.len() as u64
    }

    /// Returns the modes in the order of round `round`. Each round begins with another mode.
    pub(crate) fn order(&self, round: u32) -> impl Iterator<Item = usize> + use<> {
        let modes = self.contenders.len();
        (0..modes).map(move |trial| (trial + round as usize) % modes)
    }
}

/// Refuses modes and workloads that can't carry payloads in `direction`.
fn check_direction(direction: Direction, options: &CompareOptions) -> Result<(), Failure> {
    let modes = options.modes.iter().flat_map(|list| &list.0);
    let sides: Vec<&str> = modes.filter(|mode| !direction.is_for(**mode)).map(|mode| mode.name()).collect();
    if !sides.is_empty() {
        return Err(Failure::usage(format!(
            "--direction {direction}: {} can't carry payloads this way, because no request asks for a tensor or for a buffer by reference; modes that can: {}",
            sides.join(", "),
            names(|mode| direction.is_for(mode)),
        )));
    }
    match (direction, &options.workload) {
        (Direction::Down, Some(_)) => {
            Err(Failure::usage("--direction down is for --sizes, not for --workload"))
        }
        _ => Ok(()),
    }
}

/// Refuses modes without connections of their own for calls, if the run measures the cost of connections.
fn check_connections(options: &CompareOptions, modes: &[Mode]) -> Result<(), Failure> {
    let takes_part = |mode: Mode| mode.is_grpc() && !mode.never_sleeps() && !mode.is_by_reference();
    match modes.iter().find(|mode| options.connections.is_some() && !takes_part(**mode)) {
        Some(mode) => Err(Failure::usage(format!(
            "--connections can't measure {mode}; modes that it measures: {}",
            names(takes_part)
        ))),
        None => Ok(()),
    }
}

/// Returns the names of the modes that are `able`.
fn names(able: impl Fn(Mode) -> bool) -> String {
    let able = Mode::all().iter().filter(|mode| able(**mode));
    able.map(|mode| mode.name()).collect::<Vec<_>>().join(", ")
}

/// Refuses cells that none of `modes` can carry. If some modes can, the rows of the others give the reason
/// why they are empty.
fn check_limits(cells: &[Cell], modes: &[Mode]) -> Result<(), Failure> {
    for cell in cells {
        let reasons: Option<Vec<_>> =
            modes.iter().map(|mode| cell.beyond(*mode).map(|reason| (mode, reason))).collect();
        if let Some(&[(mode, ref reason), ..]) = reasons.as_deref() {
            return Err(Failure::usage(format!(
                "no mode of this run carries {}: {mode}: {reason}; modes that do: {}",
                cell.load,
                names(|mode| cell.beyond(mode).is_none())
            )));
        }
    }
    Ok(())
}

/// Returns whether the command line leaves the choice of cells to the command.
fn chooses_none(options: &CompareOptions) -> bool {
    let CompareOptions { sizes, workload, inflight, rate, connections, .. } = options;
    sizes.is_none() && workload.is_none() && inflight.is_none() && rate.is_none() && connections.is_none()
}

/// Returns the cells of `--defaults` at rates, if the command line names no cells of its own.
fn rate_cells(options: &CompareOptions) -> Vec<Cell> {
    let (load, inflight) = (OPEN_LOOP_LOAD, open_loop_inflight(OPEN_LOOP_LOAD));
    let is_in = |in_quick: bool| options.defaults && chooses_none(options) && (in_quick || !options.quick);
    let rates = RATES.iter().filter(|(_, in_quick)| is_in(*in_quick));
    rates.map(|(rate, _)| Cell { load, inflight, rate: Some(*rate) }).collect()
}

/// Returns every load with every number in flight at every rate.
fn cells(options: &CompareOptions) -> Vec<Cell> {
    let CompareOptions { sizes, workload, inflight, rate, .. } = options;
    let preset = preset(options.defaults, options.quick);
    if options.connections.is_some() {
        let sizes = sizes.as_ref().map_or_else(|| vec![CONNECTION_SIZE], |list| list.0.clone());
        let inflight = inflight.as_ref().map_or_else(|| vec![1], |list| list.0.clone());
        let each = |size: &u64| inflight.iter().map(|calls| Cell::closed(*size, *calls)).collect::<Vec<_>>();
        return sizes.iter().flat_map(each).collect();
    }
    if chooses_none(options) {
        return preset;
    }
    let mut loads: Vec<Workload> = items(sizes).map(Workload::Size).chain(items(workload)).collect();
    if loads.is_empty() {
        loads = match rate {
            Some(_) => vec![OPEN_LOOP_LOAD],
            None => preset.iter().filter(|cell| cell.inflight == 1).map(|cell| cell.load).collect(),
        };
    }
    let rates: Vec<Option<f64>> = if rate.is_some() { items(rate).map(Some).collect() } else { vec![None] };
    let mut cells = Vec::new();
    for load in loads {
        let inflights = match (inflight, rate) {
            (Some(_), _) => items(inflight).collect(),
            (None, Some(_)) => vec![open_loop_inflight(load)],
            (None, None) => vec![1],
        };
        let each = inflights.iter().flat_map(|inflight| rates.iter().map(move |rate| (*inflight, *rate)));
        cells.extend(each.map(|(inflight, rate)| Cell { load, inflight, rate }));
    }
    cells
}

impl CompareOptions {
    /// Returns a bound of the number of cells that the lists name, without making the cells.
    pub(crate) fn cells_at_most(&self) -> usize {
        fn length<T>(list: &Option<List<T>>) -> usize {
            list.as_ref().map_or(0, |list| list.0.len())
        }
        let loads = length(&self.sizes).saturating_add(length(&self.workload));
        [loads, length(&self.inflight), length(&self.rate)]
            .into_iter()
            .fold(1, |cells: usize, length| cells.saturating_mul(length.max(1)))
    }
}

fn items<T: Copy>(list: &Option<List<T>>) -> impl Iterator<Item = T> {
    list.iter().flat_map(|list| list.0.iter().copied())
}

/// The largest payload on the command line. The machine's memory and the modes set lower limits.
pub(crate) const MAX_BYTES: u64 = 1 << 40;

/// The largest number of calls in flight on the command line.
pub(crate) const MAX_INFLIGHT: u64 = 16_384;

/// The largest number of runs on the command line.
pub(crate) const MAX_RUNS: u64 = 99;

/// The largest number of calls in flight in an open loop without `--inflight`, and of bytes in them. With
/// some thousands of small calls at once h2 takes a peer for hostile and ends the connection
/// (`too_many_data_frames`).
const OPEN_LOOP_CALLS: usize = 1024;
const OPEN_LOOP_BYTES: u64 = 256 << 20;

/// A cell of the plan: a row of every mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cell {
    pub(crate) load: Workload,
    /// Calls in flight at once, on one connection: exactly as many in a closed loop, at most as many in an
    /// open loop.
    pub(crate) inflight: usize,
    /// Operations offered each second, even if answers are late (open loop). Without a rate each operation
    /// begins when one has ended (closed loop).
    pub(crate) rate: Option<f64>,
}

/// Returns the largest number of calls in flight of `load` in an open loop without `--inflight`. Sets have
/// one call at a time, as in a closed loop.
fn open_loop_inflight(load: Workload) -> usize {
    if load.is_set() {
        return 1;
    }
    let calls = OPEN_LOOP_BYTES / load.largest_message().max(1);
    usize::try_from(calls).unwrap_or(OPEN_LOOP_CALLS).clamp(1, OPEN_LOOP_CALLS)
}

impl Cell {
    /// Makes the cell of a closed loop of payloads of `bytes`.
    pub(crate) const fn closed(bytes: u64, inflight: usize) -> Self {
        Self { load: Workload::Size(bytes), inflight, rate: None }
    }

    /// Returns the cell's name in tables and messages: `64 B × 32`, `skew × 1 at 500/s`.
    pub(crate) fn label(self) -> String {
        let rate = self.rate.map(|rate| format!(" at {}/s", units::count(rate))).unwrap_or_default();
        format!("{} × {}{rate}", self.load, self.inflight)
    }

    /// Returns the number of operations at once, and of calls at once in each. Sets follow one another, as
    /// mini-batches do, and the calls of a set are concurrent.
    pub(crate) const fn concurrency(self) -> (usize, usize) {
        if self.load.is_set() { (1, self.inflight) } else { (self.inflight, 1) }
    }

    /// Returns the reason why `mode` can't carry the cell's messages, or `None` if the mode can.
    pub(crate) fn beyond(self, mode: Mode) -> Option<String> {
        let (limit, reason) = mode.limit()?;
        (self.load.largest_message() > limit)
            .then(|| format!("it carries messages up to {} ({reason})", units::size(limit)))
    }
}

/// The setting `--direction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Direction {
    /// From the client to the server, which checks the payload: requests carry payloads, and replies are
    /// small.
    #[default]
    Up,
    /// From the server to the client, which checks the payload: requests are small, and replies carry
    /// payloads.
    Down,
}

impl Direction {
    /// Returns whether `mode` can carry payloads in this direction.
    pub(crate) const fn is_for(self, mode: Mode) -> bool {
        match self {
            Self::Up => true,
            // The sender writes a tensor, or shares a buffer, when it has one. No request asks for it.
            Self::Down => !mode.carries_tensors() && !mode.is_by_reference(),
        }
    }

    /// Describes the direction in words.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Up => "up: requests carry the payload, the server checks it, replies are small",
            Self::Down => "down: requests are small, replies carry the payload, the client checks it",
        }
    }
}

tonic_rdma_commands::displayed_by_name!(Direction);

/// The largest number of connections on the command line.
pub(crate) const MAX_CONNECTIONS: u64 = 10_000;

/// Returns the numbers of connections to measure: powers of two below `most`, and `most`.
fn counts(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1_usize), |count| count.checked_mul(2));
    powers.take_while(|count| *count < most).chain([most]).collect()
}

/// The least number of trials of every mode in every cell, even if the trials take long.
pub(crate) const MIN_ROUNDS: u32 = 3;

/// Estimated seconds of a run: a default run then ends within 90 s and a quick one within 15 s, including
/// start and delays.
const DEFAULT: f64 = 66.0;
const QUICK: f64 = 10.5;

/// Bounds of the time for a mode in a cell: less would be noise, and more gives no better figures.
const LEAST: Duration = Duration::from_millis(20);
const MOST: Duration = Duration::from_secs(2);

/// Warm-up, as a share of the measured time.
const WARM_UP: f64 = 0.1;

/// Rough cost of an operation in the slowest mode: seconds for a message, and for each byte.
const MESSAGE: f64 = 100e-6;
const BYTE: f64 = 1e-9;

/// Operations outside the measured time: the first one, and two with a check of every byte, which take twice
/// as long.
const OUTSIDE: f64 = 5.0;

/// Returns the time for each mode in each cell of `parts` (cells, and the number of modes in them), such that
/// a run ends within 90 s, or within 15 s if `quick`. With very large payloads or very many cells a run takes
/// longer; the time is then the shortest that makes sense.
fn mode_time(parts: &[(&[Cell], usize)], quick: bool) -> Duration {
    let budget = if quick { QUICK } else { DEFAULT };
    let seconds = |duration| parts.iter().map(move |(cells, modes)| run_seconds(cells, *modes, duration));
    let fits = |duration: Duration| seconds(duration).sum::<f64>() <= budget;
    let (mut least, mut most) = (LEAST, MOST);
    if fits(most) {
        return most;
    }
    // The estimate only grows with the duration, so bisection finds where it meets the budget.
    while most - least > Duration::from_millis(1) {
        let middle = (least + most) / 2;
        if fits(middle) { least = middle } else { most = middle }
    }
    least
}

/// Returns the time of each of `trials` trials of `--connections`, such that a run ends within 90 s, or
/// within 15 s if `quick`, unless it makes thousands of connections.
fn trial_time(trials: usize, quick: bool) -> Duration {
    let budget = if quick { QUICK } else { DEFAULT };
    let each = budget / (1.0 + WARM_UP) / trials.max(1) as f64;
    Duration::from_secs_f64(each).clamp(LEAST, MOST)
}

/// Returns the seconds that a run takes if each mode has `duration` in each cell.
fn run_seconds(cells: &[Cell], modes: usize, duration: Duration) -> f64 {
    cells.iter().map(|cell| modes as f64 * mode_seconds(*cell, duration.as_secs_f64())).sum()
}

/// Returns the seconds of one mode in one cell.
fn mode_seconds(cell: Cell, duration: f64) -> f64 {
    let operation = cell.load.most_messages() as f64 * MESSAGE + cell.load.bytes() as f64 * BYTE;
    let (callers, _) = cell.concurrency();
    // Each caller makes at least one operation in each round.
    let shortest = f64::from(MIN_ROUNDS) * operation * callers as f64;
    let timed = match cell.rate {
        None => duration.max(shortest),
        // The run waits for a mode that falls behind, at most for another `duration`.
        Some(_) => 2.0 * duration,
    };
    timed + (WARM_UP * duration).max(operation) + OUTSIDE * operation
}

/// Refuses cells that need more memory than is available.
fn fits(cells: &[Cell], modes: &[Mode], direction: Direction, available: Option<u64>) -> Result<(), Failure> {
    let need = |cell: &Cell| match direction {
        Direction::Up => needed(*cell, modes),
        // The server also has the content, to send it from there.
        Direction::Down => needed(*cell, modes).saturating_add(room(cell.load)),
    };
    match (cells.iter().max_by_key(|cell| need(cell)), available) {
        (Some(cell), Some(available)) if need(cell) > available => {
            let lacking = lacking(need(cell), available);
            let text = format!("{} {lacking}: take a smaller size or fewer in flight", cell.label());
            Err(Failure::usage(text))
        }
        _ => Ok(()),
    }
}

/// Returns the memory that both processes need for `cell` at most. The modes share the content, and only one
/// mode at a time has messages in flight.
fn needed(cell: Cell, modes: &[Mode]) -> u64 {
    let taking_part = || modes.iter().filter(|mode| cell.beyond(**mode).is_none());
    // The modes that send from registered memory share a copy of the content there.
    let registered = taking_part().any(|mode| mode.registers_payloads() || mode.sends_in_place());
    let registered = if registered { room(cell.load) } else { 0 };
    let kept = taking_part().map(|mode| kept(cell, *mode)).fold(registered, u64::saturating_add);
    let in_flight = taking_part().map(|mode| in_flight(cell, *mode)).max().unwrap_or(0);
    room(cell.load).saturating_add(kept).saturating_add(in_flight)
}

/// Returns the memory that `mode` keeps during the whole cell, including the trials of other modes.
fn kept(cell: Cell, mode: Mode) -> u64 {
    match mode {
        // A copy of the content: that of the owner, and that of memcpy.
        Mode::GrpcReference | Mode::GrpcReferenceTcp | Mode::Memcpy => room(cell.load),
        // The slots at the receiver, or the tensors that it has read or asked for; and a copy at the sender.
        mode if mode.carries_tensors() => {
            let is_batch = matches!(cell.load, Workload::Mix(_) | Workload::Blocks) && !mode.is_passed();
            let copies = u64::from(mode == Mode::RdmaCp || is_batch);
            room(cell.load).saturating_mul(cell.inflight as u64 + copies)
        }
        _ => 0,
    }
}

/// Returns the memory of `mode`'s messages in flight.
fn in_flight(cell: Cell, mode: Mode) -> u64 {
    let calls = cell.load.largest_message().saturating_mul(cell.inflight as u64);
    let calls = if cell.load.is_set() { calls.min(cell.load.largest_operation()) } else { calls };
    match mode {
        // Messages are sent from where they lie. They land in blocks, which may be larger than the messages.
        Mode::GrpcNativeGather | Mode::GrpcReference | Mode::GrpcReferenceTcp => {
            calls.saturating_mul(2).saturating_add(cell.load.largest_message())
        }
        // The encoded message, and the receiver's buffer, which may have to grow; and one message that is
        // kept for a check of every byte.
        mode if mode.is_grpc() => calls.saturating_mul(3).saturating_add(cell.load.largest_message()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use tonic_rdma_commands::Flavour;

    fn plan(duration: Duration) -> Plan {
        let (modes, cells) = (Mode::default_list(false, Flavour::IdlePolling), preset(false, false));
        let contenders = Contender::all(&modes, &[Http2::DEFAULT]);
        let (connections, direction) = (Vec::new(), Direction::Up);
        Plan { modes, contenders, cells, connections, direction, duration, rates: None }
    }

    fn asked(arguments: &[&str]) -> Vec<Cell> {
        cells(&CompareOptions::of(arguments))
    }

    #[test]
    fn lists_give_the_cross_product() {
        let cell = Cell::closed;
        let small = [cell(64, 1), cell(64, 32), cell(8 << 10, 64)];
        let defaults = [cell(64, 1), cell(64, 64), cell(64 << 10, 1), cell(1 << 20, 1), cell(16 << 20, 1)];
        assert_eq!((asked(&[]).len(), &asked(&[])[..3]), (9, &small[..]));
        assert_eq!((asked(&["--quick"]).len(), &asked(&["--quick"])[..3]), (6, &small[..]));
        assert_eq!((asked(&["--defaults"]).len(), asked(&["--defaults"])[4]), (6, cell(4 << 20, 1)));
        assert_eq!(asked(&["--defaults", "--quick"]), defaults);
        assert_eq!(asked(&["--defaults", "--sizes", "7"]), [cell(7, 1)]);
        let all = asked(&["--sizes", "64,4096", "--inflight", "1,8"]);
        assert_eq!(all, [cell(64, 1), cell(64, 8), cell(4096, 1), cell(4096, 8)]);
        assert_eq!(asked(&["--quick", "--sizes", "7"]), [cell(7, 1)]);
        assert!(asked(&["--quick", "--inflight", "4"]).iter().all(|cell| cell.inflight == 4));
    }

    #[test]
    fn defaults_have_rates_unless_cells_are_chosen() {
        let of = |arguments: &[&str]| Plan::new(&CompareOptions::of(arguments)).unwrap();
        let rates = |plan: &Plan| {
            plan.rates
                .iter()
                .flat_map(|part| part.cells.iter().filter_map(|cell| cell.rate))
                .collect::<Vec<_>>()
        };
        let usual = of(&["--defaults"]);
        assert_eq!((usual.cells.len(), rates(&usual)), (6, vec![1000.0, 10_000.0, 30_000.0]));
        assert_eq!(usual.rates.unwrap().modes, RATE_MODES);
        let quick = of(&["--defaults", "--quick", "--modes", "grpc-tcp,rdma-cp"]);
        assert_eq!((rates(&quick), quick.rates.unwrap().modes), (vec![1000.0], quick.modes));
        for chosen in [
            &["--sizes", "64"][..],
            &["--inflight", "1"],
            &["--workload", "gru"],
            &["--rate", "5"],
            &["--connections", "2"],
        ] {
            assert!(of(&[&["--defaults"], chosen].concat()).rates.is_none(), "{chosen:?}");
        }
        assert!(of(&["--quick"]).rates.is_none());
    }

    #[test]
    fn workloads_add_to_sizes_and_rates_apply_to_all() {
        let skew = Workload::from_name("skew").unwrap();
        let gru = Workload::from_name("gru").unwrap();
        let cell = |load, inflight, rate| Cell { load, inflight, rate };
        assert_eq!(asked(&["--workload", "skew"]), [cell(skew, 1, None)]);
        assert_eq!(asked(&["--workload", "gru", "--sizes", "64"]), [Cell::closed(64, 1), cell(gru, 1, None)]);
        let rates = asked(&["--rate", "100,2000"]);
        let small = |rate| cell(Workload::Size(64), 1024, Some(rate));
        assert_eq!(rates, [small(100.0), small(2000.0)]);
        let bounded = asked(&["--rate", "5", "--workload", "skew,gru", "--inflight", "3"]);
        assert_eq!(bounded, [cell(skew, 3, Some(5.0)), cell(gru, 3, Some(5.0))]);
    }

    #[test]
    fn every_mode_gets_its_time_and_rounds_begin_with_different_modes() {
        for millis in [1, 100, 200, 2000, 60_000] {
            let plan = plan(Duration::from_millis(millis));
            for rate in [None, Some(0.1), Some(1000.0), Some(1e6)] {
                let cell = Cell { rate, ..Cell::closed(64, 1) };
                assert!(plan.rounds(cell) >= MIN_ROUNDS);
                assert!(plan.slice(cell) * plan.rounds(cell) >= plan.duration);
                let arrivals = rate.unwrap_or(1.0) * plan.slice(cell).as_secs_f64();
                assert!(rate.is_none() || (0.99..=MAX_ARRIVALS).contains(&arrivals), "{arrivals}");
            }
        }
        let plan = plan(Duration::from_secs(1));
        assert_eq!(plan.order(0).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(plan.order(14).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]);
    }

    #[test]
    fn a_direction_has_only_the_modes_that_can_carry_it() {
        let modes = |arguments: &[&str]| Plan::new(&CompareOptions::of(arguments)).unwrap().modes;
        let down = ["--quick", "--direction", "down"];
        assert_eq!(modes(&["--quick"]), Mode::default_list(false, Flavour::IdlePolling));
        assert_eq!(modes(&["--quick", "--defaults"]), Mode::default_list(true, Flavour::multi_thread()));
        assert!(!modes(&["--quick", "--runtime", "multi-thread:2"]).contains(&Mode::GrpcTcpBusy));
        let calls = Mode::default_list(false, Flavour::IdlePolling).into_iter();
        let calls = calls.filter(|mode| mode.is_grpc() && !mode.is_by_reference());
        assert_eq!(modes(&down), calls.collect::<Vec<_>>());
        assert_eq!(
            modes(&[&down[..], &["--modes", "grpc-uds,memcpy"]].concat()),
            [Mode::GrpcUds, Mode::Memcpy]
        );
    }

    #[test]
    fn connections_are_measured_in_modes_with_calls_alone() {
        let plan = |arguments: &[&str]| Plan::new(&CompareOptions::of(arguments));
        let usual = plan(&["--connections", "100"]).unwrap();
        assert_eq!(
            (usual.modes.as_slice(), usual.cells.as_slice()),
            (&CONNECTION_MODES[..], &[Cell::closed(64, 1)][..])
        );
        assert_eq!((usual.connections.len(), usual.trials()), (8, 3 * 15));
        assert!(usual.duration > Duration::from_millis(500) && usual.duration < Duration::from_secs(3));
        let quick = plan(&["--connections", "100", "--quick"]).unwrap();
        assert!(quick.duration < usual.duration);
        let chosen = [
            "--connections",
            "3",
            "--sizes",
            "64,1KiB",
            "--inflight",
            "1,8",
            "--modes",
            "grpc-native-gather",
        ];
        let chosen = plan(&chosen).unwrap();
        assert_eq!((chosen.cells.len(), &chosen.connections[..]), (4, &[1, 2, 3][..]));
        let refused = plan(&["--connections", "3", "--modes", "grpc-tcp,rdma-cp"]).unwrap_err().to_string();
        assert!(refused.contains("can't measure rdma-cp") && refused.contains("grpc-native"), "{refused}");
    }

    #[test]
    fn cells_are_refused_only_if_no_mode_carries_them() {
        let cells = [Cell::closed(64, 1), Cell::closed(3 << 30, 1)];
        let grpc: Vec<Mode> = Mode::all().iter().copied().filter(|mode| mode.is_grpc()).collect();
        let refusal = check_limits(&cells, &grpc).unwrap_err().to_string();
        for named in ["3 GiB", "grpc-tcp", "2047 MiB", "rdma-zerocp-await, rdma-dynamic, rdma-named, memcpy"]
        {
            assert!(refusal.contains(named), "{named} in {refusal}");
        }
        check_limits(&cells, &Mode::default_list(false, Flavour::IdlePolling)).unwrap();
        check_limits(&cells[..1], &grpc).unwrap();
    }
}

#[cfg(test)]
mod cell_tests {
    use super::*;
    use crate::workload::{Mix, Model};

    const VGG: Workload = Workload::Model(Model::Vgg16);

    #[test]
    fn labels_have_load_rate_and_calls_in_flight() {
        assert_eq!(Cell::closed(64, 32).label(), "64 B × 32");
        let skew = Workload::Mix(Mix::Skew);
        assert_eq!(Cell { load: skew, inflight: 8, rate: Some(500.0) }.label(), "skew × 8 at 500/s");
    }

    #[test]
    fn the_calls_of_a_set_are_concurrent() {
        let cell = |inflight| Cell { load: VGG, inflight, rate: None };
        assert_eq!(cell(8).concurrency(), (1, 8));
        assert_eq!(Cell::closed(64, 8).concurrency(), (8, 1));
        let blocks = Cell { load: Workload::Blocks, inflight: 16, rate: None };
        assert_eq!((blocks.concurrency(), blocks.load.most_messages()), ((1, 16), 4096));
    }

    #[test]
    fn a_cell_beyond_a_mode_has_a_reason() {
        let limit = Cell::closed(2047 << 20, 1);
        assert!(Mode::all().iter().all(|mode| limit.beyond(*mode).is_none()));
        let beyond = Cell::closed(3 << 30, 1);
        assert!(beyond.beyond(Mode::GrpcTcp).is_some_and(|reason| reason.contains("2047 MiB")));
        assert_eq!(beyond.beyond(Mode::Memcpy), None);
    }

    #[test]
    fn an_open_loop_has_bounded_calls_and_bytes() {
        let calls = |bytes| open_loop_inflight(Workload::Size(bytes));
        assert_eq!([calls(1), calls(64 << 10), calls(1 << 20), calls(1 << 30)], [1024, 1024, 256, 1]);
        assert_eq!(open_loop_inflight(VGG), 1);
    }
}

#[cfg(test)]
mod direction_tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for direction in Direction::value_variants() {
            assert_eq!(Direction::from_str(direction.name(), false), Ok(*direction));
        }
    }

    #[test]
    fn only_tensors_and_references_lack_the_direction_down() {
        for mode in Mode::all() {
            let lacks = mode.carries_tensors() || mode.is_by_reference();
            assert_eq!(Direction::Down.is_for(*mode), !lacks, "{mode}");
            assert!(Direction::Up.is_for(*mode));
        }
    }
}

#[cfg(test)]
mod connections_tests {
    use super::*;

    #[test]
    fn counts_double_and_end_with_the_largest() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
        assert_eq!(counts(100), [1, 2, 4, 8, 16, 32, 64, 100]);
        assert_eq!(counts(MAX_CONNECTIONS as usize).len(), 15);
    }
}

#[cfg(test)]
mod budget_tests {
    use super::*;
    use crate::compare::modes::mode::Mode;
    use crate::compare::plan::preset;
    use tonic_rdma_commands::Flavour;

    fn time(cells: &[Cell], modes: usize, quick: bool) -> Duration {
        mode_time(&[(cells, modes)], quick)
    }

    #[test]
    fn a_default_run_fits_with_any_number_of_modes() {
        let (default_cells, quick_cells) = (preset(false, false), preset(false, true));
        for modes in 1..=Mode::default_list(false, Flavour::IdlePolling).len() {
            let (default, quick) = (time(&default_cells, modes, false), time(&quick_cells, modes, true));
            assert!(run_seconds(&default_cells, modes, default) <= DEFAULT, "{modes}: {default:?}");
            assert!(run_seconds(&quick_cells, modes, quick) <= QUICK, "{modes}: {quick:?}");
            // The time is enough for some hundred operations of the slowest mode, except with the largest
            // payloads.
            assert!(default > Duration::from_millis(450) && quick > Duration::from_millis(100), "{modes}");
        }
    }

    #[test]
    fn more_cells_mean_less_time_for_each_within_bounds() {
        let cells = |count| vec![Cell::closed(64, 1); count];
        assert_eq!(time(&cells(1), 1, true), MOST);
        assert!(time(&cells(20), 4, true) > time(&cells(60), 4, true));
        assert_eq!(time(&cells(10_000), 4, false), LEAST);
    }

    #[test]
    fn slow_cells_leave_less_time_for_others() {
        let long = |load| {
            let mut cells = vec![Cell::closed(64, 1); 20];
            cells.push(Cell { load, inflight: 1, rate: None });
            time(&cells, 4, false)
        };
        assert!(long(Workload::Size(1 << 30)) < long(Workload::Size(1 << 20)));
        assert!(long(Workload::Blocks) < long(Workload::Size(1 << 20)));
        let open = Cell { rate: Some(10.0), ..Cell::closed(64, 1) };
        assert!(time(&[open; 20], 4, false) < time(&[Cell::closed(64, 1); 20], 4, false));
    }
}

#[cfg(test)]
mod memory_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::Model;

    const GIB: u64 = 1 << 30;

    #[test]
    fn cells_beyond_the_memory_are_refused_with_both_figures() {
        let cells = [Cell::closed(64, 1), Cell::closed(GIB, 512)];
        let refusal = fits(&cells, Mode::all(), Direction::Up, Some(8 * GIB)).unwrap_err().to_string();
        assert!(refusal.contains("1 GiB × 512 needs about 4103 GiB"), "{refusal}");
        assert!(refusal.contains("8.00 GiB are available"), "{refusal}");
        fits(&cells, Mode::all(), Direction::Up, None).unwrap();
        fits(&cells[..1], Mode::all(), Direction::Up, Some(8 * GIB)).unwrap();
        let (one, tcp) = ([Cell::closed(GIB, 1)], [Mode::GrpcTcp]);
        fits(&one, &tcp, Direction::Up, Some(5 * GIB)).unwrap();
        fits(&one, &tcp, Direction::Down, Some(6 * GIB)).unwrap();
        assert!(
            fits(&one, &tcp, Direction::Down, Some(5 * GIB)).unwrap_err().to_string().contains("6.00 GiB")
        );
    }

    #[test]
    fn no_payload_needs_more_than_a_few_times_its_size_in_any_one_mode() {
        for mode in Mode::all() {
            for bytes in [256 << 20, GIB] {
                assert!(needed(Cell::closed(bytes, 1), &[*mode]) <= 5 * bytes, "{mode}");
            }
        }
        assert_eq!(needed(Cell::closed(3 * GIB, 1), &[Mode::Memcpy]), 6 * GIB);
        assert_eq!(needed(Cell::closed(3 * GIB, 1), &[Mode::RdmaZerocp]), 9 * GIB);
    }

    #[test]
    fn modes_that_skip_a_cell_need_no_memory_for_it() {
        assert_eq!(needed(Cell::closed(3 * GIB, 1), &[Mode::GrpcTcp, Mode::Memcpy]), 6 * GIB);
    }

    #[test]
    fn the_memory_of_a_set_is_bounded_by_the_set() {
        let load = Workload::Model(Model::Vgg16);
        let need = |inflight| needed(Cell { load, inflight, rate: None }, &[Mode::GrpcTcp]);
        let set = room(load);
        assert_eq!(need(1), set + (3 + 1) * (392 << 20));
        assert_eq!(need(1000), set + 3 * load.bytes() + (392 << 20));
    }
}
