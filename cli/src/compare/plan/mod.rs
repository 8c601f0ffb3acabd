//! The plan of a run: modes, cells, time, and the order of turns.

pub(crate) mod budget;
pub(crate) mod cell;

use std::time::Duration;

use tonic_rdma_commands::{Failure, List};

use crate::compare::modes::mode::Mode;
use crate::compare::options::{CompareOptions, Conditions};
use crate::compare::plan::budget::MIN_ROUNDS;
use crate::compare::plan::cell::{Cell, Direction, counts, open_loop_inflight};
use crate::workload::Workload;

/// The cells of a run without `--sizes` and `--inflight`: small calls alone and many at once, then one large call at a
/// time. Each is a payload, calls in flight, and whether the cell is in a usual run, in one with `--quick`, with `--newcomer`, and with
/// both. README has the figures of a program that chooses nothing for the cells of `--newcomer`.
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
fn preset(newcomer: bool, quick: bool) -> Vec<Cell> {
    let column = 2 * usize::from(newcomer) + usize::from(quick);
    let cells = PRESETS.iter().filter(|(_, _, is_in)| is_in[column]);
    cells.map(|(bytes, inflight, _)| Cell::closed(*bytes, *inflight)).collect()
}

/// The largest number of operations of one turn of an open loop. The times of all of them are drawn before the turn begins.
pub(crate) const MAX_ARRIVALS: f64 = 1e6;

/// The payload of an open loop without `--sizes`. It is small, because a large payload at a high rate would be too
/// much.
const OPEN_LOOP_LOAD: Workload = Workload::Size(64);

/// The modes of `--connections` without `--modes`, and the payload without `--sizes`.
const CONNECTION_MODES: [Mode; 3] = [Mode::GrpcTcp, Mode::GrpcRdma, Mode::GrpcNative];
const CONNECTION_SIZE: u64 = 64;

/// The plan of a whole run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Modes in the order of the table.
    pub(crate) modes: Vec<Mode>,
    /// Cells in the order of the table.
    pub(crate) cells: Vec<Cell>,
    /// Numbers of connections to measure, without which each mode has one connection.
    pub(crate) connections: Vec<usize>,
    /// The direction of payloads.
    pub(crate) direction: Direction,
    /// Time for each mode in each cell.
    pub(crate) duration: Duration,
}

impl Plan {
    /// Makes the plan of the run that `options` ask for, if the machine has the memory for it.
    pub(crate) fn new(options: &CompareOptions) -> Result<Self, Failure> {
        let direction = options.direction;
        check_direction(direction, options)?;
        let runtime = Conditions::of(options).runtime;
        let usual = || match options.connections {
            None => Mode::default_list(options.newcomer, runtime),
            Some(_) => CONNECTION_MODES.to_vec(),
        };
        let mut modes = options.modes.clone().map_or_else(usual, |list| list.0);
        if let Some(mode) = modes.iter().find(|mode| !mode.is_for(runtime)) {
            return Err(Failure::usage(format!(
                "--modes {mode} is for runtimes of one thread (--runtime idle-polling or current-thread): in {runtime} \
                 threads sleep"
            )));
        }
        modes.retain(|mode| direction.is_for(*mode));
        let cells = cells(options);
        check_limits(&cells, &modes)?;
        let connections = options.connections.map(counts).unwrap_or_default();
        let most = connections.last().copied().unwrap_or(1);
        check_connections(options, &modes)?;
        let together = |cell: &Cell| Cell { inflight: cell.inflight.saturating_mul(most), ..*cell };
        budget::check(&cells.iter().map(together).collect::<Vec<_>>(), &modes, direction)?;
        let usual = || match options.connections {
            None => budget::duration(&cells, modes.len(), options.quick),
            Some(_) => budget::turn(2 * connections.len() * cells.len() * modes.len(), options.quick),
        };
        let duration = options.duration.unwrap_or_else(usual);
        Ok(Self { modes, cells, connections, direction, duration })
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

    /// Returns the length of one mode's turn. It is short compared with the drift of a machine, and long compared with
    /// the change of modes. Turns of an open loop are long, so that queues can build up, but not longer than their
    /// schedule has room for.
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

    /// Returns the number of turns of each mode in a cell.
    pub(crate) fn rounds(&self, cell: Cell) -> u32 {
        let turns = self.duration.as_secs_f64() / self.slice(cell).as_secs_f64();
        (turns.ceil() as u32).max(MIN_ROUNDS)
    }

    /// Returns the number of turns of all modes in all cells.
    pub(crate) fn turns(&self) -> u64 {
        if let [_, several @ ..] = self.connections.as_slice() {
            // One connection has one turn, and several have two.
            return (1 + 2 * several.len() as u64) * (self.cells.len() * self.modes.len()) as u64;
        }
        let rounds: u64 = self.cells.iter().map(|cell| u64::from(self.rounds(*cell))).sum();
        rounds * self.modes.len() as u64
    }

    /// Returns the modes in the order of round `round`. Each round begins with another mode.
    pub(crate) fn order(&self, round: u32) -> impl Iterator<Item = usize> + use<> {
        let modes = self.modes.len();
        (0..modes).map(move |turn| (turn + round as usize) % modes)
    }
}

/// Refuses modes and workloads that can't carry payloads in `direction`.
fn check_direction(direction: Direction, options: &CompareOptions) -> Result<(), Failure> {
    let modes = options.modes.iter().flat_map(|list| &list.0);
    let sides: Vec<&str> = modes.filter(|mode| !direction.is_for(**mode)).map(|mode| mode.name()).collect();
    if !sides.is_empty() {
        return Err(Failure::usage(format!(
            "--direction {direction}: {} can't carry payloads this way, because the sender of a tensor writes it without a request; modes that can: {}",
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
    let takes_part = |mode: Mode| mode.is_grpc() && !mode.never_sleeps();
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

/// Refuses cells that none of `modes` can carry. If some modes can, the rows of the others give the reason why they are
/// empty.
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

/// Returns every load with every number in flight at every rate.
fn cells(options: &CompareOptions) -> Vec<Cell> {
    let CompareOptions { sizes, workload, inflight, rate, .. } = options;
    let preset = preset(options.newcomer, options.quick);
    if options.connections.is_some() {
        let sizes = sizes.as_ref().map_or_else(|| vec![CONNECTION_SIZE], |list| list.0.clone());
        let inflight = inflight.as_ref().map_or_else(|| vec![1], |list| list.0.clone());
        let each = |size: &u64| inflight.iter().map(|calls| Cell::closed(*size, *calls)).collect::<Vec<_>>();
        return sizes.iter().flat_map(each).collect();
    }
    if sizes.is_none() && workload.is_none() && inflight.is_none() && rate.is_none() {
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

fn items<T: Copy>(list: &Option<List<T>>) -> impl Iterator<Item = T> {
    list.iter().flat_map(|list| list.0.iter().copied())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use tonic_rdma_commands::Flavour;

    fn plan(duration: Duration) -> Plan {
        let (modes, cells) = (Mode::default_list(false, Flavour::IdlePolling), preset(false, false));
        Plan { modes, cells, connections: Vec::new(), direction: Direction::Up, duration }
    }

    fn asked(arguments: &[&str]) -> Vec<Cell> {
        cells(&CompareOptions::of(arguments))
    }

    #[test]
    fn lists_give_the_cross_product() {
        let cell = Cell::closed;
        let small = [cell(64, 1), cell(64, 32), cell(8 << 10, 64)];
        let newcomer = [cell(64, 1), cell(64, 64), cell(64 << 10, 1), cell(1 << 20, 1), cell(16 << 20, 1)];
        assert_eq!((asked(&[]).len(), &asked(&[])[..3]), (9, &small[..]));
        assert_eq!((asked(&["--quick"]).len(), &asked(&["--quick"])[..3]), (6, &small[..]));
        assert_eq!((asked(&["--newcomer"]).len(), asked(&["--newcomer"])[4]), (6, cell(4 << 20, 1)));
        assert_eq!(asked(&["--newcomer", "--quick"]), newcomer);
        assert_eq!(asked(&["--newcomer", "--sizes", "7"]), [cell(7, 1)]);
        let all = asked(&["--sizes", "64,4096", "--inflight", "1,8"]);
        assert_eq!(all, [cell(64, 1), cell(64, 8), cell(4096, 1), cell(4096, 8)]);
        assert_eq!(asked(&["--quick", "--sizes", "7"]), [cell(7, 1)]);
        assert!(asked(&["--quick", "--inflight", "4"]).iter().all(|cell| cell.inflight == 4));
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
        assert_eq!(plan.order(0).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(plan.order(13).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1]);
    }

    #[test]
    fn a_direction_has_only_the_modes_that_can_carry_it() {
        let modes = |arguments: &[&str]| Plan::new(&CompareOptions::of(arguments)).unwrap().modes;
        let down = ["--quick", "--direction", "down"];
        assert_eq!(modes(&["--quick"]), Mode::default_list(false, Flavour::IdlePolling));
        assert_eq!(modes(&["--quick", "--newcomer"]), Mode::default_list(true, Flavour::multi_thread()));
        assert!(!modes(&["--quick", "--runtime", "multi-thread:2"]).contains(&Mode::GrpcTcpBusy));
        let calls = Mode::default_list(false, Flavour::IdlePolling).into_iter().filter(|mode| mode.is_grpc());
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
        assert_eq!((usual.connections.len(), usual.turns()), (8, 3 * 15));
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
        for named in ["3 GiB", "grpc-tcp", "2047 MiB", "rdma-zerocp, rdma-zerocp-await, memcpy"] {
            assert!(refusal.contains(named), "{named} in {refusal}");
        }
        check_limits(&cells, &Mode::default_list(false, Flavour::IdlePolling)).unwrap();
        check_limits(&cells[..1], &grpc).unwrap();
    }
}
