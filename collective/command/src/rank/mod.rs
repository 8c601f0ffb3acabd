//! The work of one rank.

mod content;
mod meter;

use std::time::Instant;

use tokio::runtime::Runtime;

use self::meter::{Figures, Meter};
use crate::launch::{RankSpec, announce};
use crate::options::{Algorithm, Cell, Options, Pin};
use crate::report::{Compared, Counted, Key, Moved, Plans, Report, Results, Row};
use tonic_rdma::Config;
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, PlanChoice, Reduction};
use tonic_rdma_commands::{Failure, process};

/// Variables of launchers: one of them is set in each rank that a launcher started.
const LAUNCHED: &[&str] = &["RDMA_COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];
/// Variables of torchrun, and of Hydra's mpirun, which are there together.
const TORCHRUN: &[&str] = &["RANK", "WORLD_SIZE"];
const HYDRA: &[&str] = &["PMI_RANK", "PMI_SIZE"];

/// Takes the reports of a rank.
type Sink<'a> = &'a mut dyn FnMut(Report) -> Result<(), Failure>;

/// Returns whether a launcher started this process as one of several ranks.
pub(crate) fn is_launched() -> bool {
    LAUNCHED.iter().any(is_set) || TORCHRUN.iter().all(is_set) || HYDRA.iter().all(is_set)
}

/// Returns whether mpirun did.
pub(crate) fn is_of_mpirun() -> bool {
    is_set(&"OMPI_COMM_WORLD_RANK") || HYDRA.iter().all(is_set)
}

fn is_set(name: &&str) -> bool {
    std::env::var_os(name).is_some()
}

/// Works as a rank that this command started. The reports, also of failures, go to the process that did so: a
/// line of JSON for each.
pub(crate) fn work_as_child(options: &Options, spec: &str) -> Result<(), Failure> {
    let spec = RankSpec::parse(spec)?;
    spec.take()?;
    let first = spec.rank == 0;
    let mut sink = |report: Report| -> Result<(), Failure> {
        // Rank 0 reports for all.
        if !first && !matches!(report, Report::Done { .. } | Report::Failed { .. }) {
            return Ok(());
        }
        process::report(&report)
    };
    let launch = |address: &String| {
        let launch = Launch::new(spec.rank, spec.size, address.clone());
        match spec.host {
            Some(host) => launch.host(format!("simulated {host}")),
            None => launch,
        }
    };
    let launches = spec.addresses.iter().map(launch).collect();
    match work(options, launches, spec.core.is_some(), &mut sink) {
        Ok(wrong) => sink(Report::Done { wrong }),
        Err(failure) => sink(Report::Failed { reason: failure.with_causes() }),
    }
}

/// Works as a rank that a launcher started. Rank 0 gets the results.
pub(crate) fn work_as_launched(options: &Options) -> Result<Option<Results>, Failure> {
    let launch = Launch::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let first = launch.rank() == 0;
    // Only rank 0 writes files. The others may run on hosts without its folders.
    if first {
        options.check_files()?;
    }
    let launches = (0..options.algorithms().len()).map(|index| at_port(&launch, index));
    let mut results = Results::default();
    let mut sink = |report: Report| -> Result<(), Failure> {
        if first {
            announce(&report);
            results.add(report);
        }
        Ok(())
    };
    let wrong = work(options, launches.collect::<Result<_, _>>()?, options.pin == Pin::Yes, &mut sink)?;
    results.wrong = wrong;
    match (first, wrong) {
        (true, _) => Ok(Some(results)),
        (false, 0) => Ok(None),
        (false, wrong) => Err(Failure::run(format!("rank {} found {wrong} wrong elements", launch.rank()))),
    }
}

/// Returns the launch of another communicator of the same ranks: its port is `index` higher.
fn at_port(launch: &Launch, index: usize) -> Result<Launch, Failure> {
    let refused =
        || Failure::usage(format!("the address {:?} has no port for {index} more groups", launch.address()));
    let (host, port) = launch.address().rsplit_once(':').ok_or_else(refused)?;
    let port = port.parse::<u16>().ok().and_then(|port| port.checked_add(u16::try_from(index).ok()?));
    let address = format!("{host}:{}", port.ok_or_else(refused)?);
    let other = Launch::new(launch.rank(), launch.size(), address);
    let other = other.job(format!("{} {index}", launch.job_name()));
    Ok(match launch.host_name() {
        Some(host) => other.host(host),
        None => other,
    })
}

/// Connects and measures all cells. Returns the number of wrong elements of this rank.
fn work(options: &Options, launches: Vec<Launch>, own_cores: bool, sink: Sink<'_>) -> Result<u64, Failure> {
    let size = launches.first().map_or(1, Launch::size);
    let cells = options.cells(size)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| Failure::run("can't start the runtime").because(error))?;
    let _context = runtime.enter();
    let connect = |(launch, algorithm)| Group::connect(&runtime, launch, algorithm);
    let groups: Vec<Group> =
        launches.into_iter().zip(options.algorithms()).map(connect).collect::<Result<_, _>>()?;
    for group in groups.iter().filter(|group| group.algorithm == Algorithm::Auto) {
        sink(Report::Plans(Plans { ranks: size, text: group.communicator.plans().to_string() }))?;
    }
    let (check, beat) = (options.tuner_check, Instant::now());
    let mut meter = Meter { groups: &groups, own_cores, check, sink, beat, wrong: 0 };
    for cell in &cells {
        let figures = meter.cell(cell)?;
        report(options, size, cell, &groups, &figures, meter.sink)?;
    }
    let wrong = meter.wrong;
    // No rank leaves while another still measures.
    groups.iter().try_for_each(Group::barrier)?;
    Ok(wrong)
}

/// Reports the figures of a cell.
fn report(
    options: &Options,
    ranks: usize,
    cell: &Cell,
    groups: &[Group],
    figures: &[Figures],
    sink: Sink<'_>,
) -> Result<(), Failure> {
    let (mut auto_us, mut fixed_us) = (0.0, Vec::new());
    for (group, figures) in groups.iter().zip(figures) {
        let (algorithm, operations) = (group.algorithm, figures.latencies.len());
        let mut middle = None;
        if operations > 0 {
            let key = Key { ranks, bytes: cell.bytes, algorithm, kind: cell.kind, operand: cell.operand };
            let row = Row::new(key, cell.reduction, &figures.latencies, figures.errors);
            middle = Some(row.p50_us);
            sink(Report::Row(row))?;
            if options.counters {
                let hosts = options.hosts.as_ref().map(|hosts| hosts.0.clone()).unwrap_or_default();
                sink(Report::Counted(Counted::new(key, hosts, operations, &figures.moved)))?;
            }
        }
        match algorithm {
            Algorithm::Auto => auto_us = middle.unwrap_or(0.0),
            fixed => fixed_us.push((fixed, middle)),
        }
    }
    if options.tuner_check {
        sink(Report::Compared(Compared { ranks, bytes: cell.bytes, auto_us, fixed_us }))?;
    }
    Ok(())
}

/// The largest message of a step of a fixed algorithm, in bytes.
const CHUNK: usize = 256 << 10;

/// The communicator of one algorithm.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) communicator: Communicator,
    pub(crate) algorithm: Algorithm,
}

impl Group {
    /// Meets the other ranks. The variables `RDMA_*` have the settings of connections.
    pub(crate) fn connect(runtime: &Runtime, launch: Launch, algorithm: Algorithm) -> Result<Self, Failure> {
        let rank = launch.rank();
        let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
        let mut builder = Communicator::builder().config(config).launch(launch);
        if let Some(algorithm) = algorithm.fixed() {
            builder = builder.plans(PlanChoice::Fixed { algorithm, chunk_bytes: CHUNK });
        }
        let communicator = runtime.block_on(builder.connect()).map_err(|error| {
            Failure::run(format!("rank {rank} can't meet the other ranks")).because(error)
        })?;
        Ok(Self { communicator, algorithm })
    }

    /// Waits until all ranks are here.
    pub(crate) fn barrier(&self) -> Result<(), Failure> {
        self.communicator.barrier().wait().map(drop).map_err(failed)
    }

    /// Makes each value that of all ranks.
    pub(crate) fn combine(&self, values: &mut [f64], reduction: Reduction) -> Result<(), Failure> {
        self.communicator.all_reduce(values, reduction).wait().map(drop).map_err(failed)
    }

    /// Returns the bytes that the operations of this rank have sent, received, sent to other hosts, and copied
    /// within this rank. Barriers move none.
    pub(crate) fn moved(&self) -> Moved<u64> {
        let found = self.communicator.statistics();
        [
            found.inline_bytes + found.referenced_bytes,
            found.received_bytes,
            found.across_bytes,
            found.copied_bytes,
        ]
    }
}

/// Makes the failure of an operation.
pub(crate) fn failed(error: impl Into<CollectiveError>) -> Failure {
    Failure::run("an operation failed").because(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_communicator_of_a_launcher_has_a_port_of_its_own() {
        let launch = Launch::new(1, 4, "10.0.0.1:29000");
        let third = at_port(&launch, 2).unwrap();
        assert_eq!((third.rank(), third.size(), third.address()), (1, 4, "10.0.0.1:29002"));
        for address in ["10.0.0.1:65534", "nowhere"] {
            let error = at_port(&Launch::new(0, 2, address), 2).unwrap_err().to_string();
            assert!(error.contains(address), "{error}");
        }
    }
}
