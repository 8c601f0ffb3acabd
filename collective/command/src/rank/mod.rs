//! The work of one rank.

mod clock;
mod content;
mod group;
mod meter;
mod operands;
mod sink;

use tonic_rdma_collective::Launch;

pub(crate) use self::clock::now;
pub(crate) use self::group::config;

use self::group::Group;
use self::meter::{Figures, Meter};
use self::sink::{Own, Parent, Sink};
use crate::choices::Algorithm;
use crate::kills;
use crate::launch::Place;
use crate::options::{Cell, Options, Pin};
use crate::output::Results;
use crate::report::{Compared, Counted, Plans, Report, Row};
use crate::statistics::median;
use tonic_rdma_commands::Failure;

/// Variables of launchers: one of them is set in each rank that a launcher started.
const LAUNCHED: &[&str] = &["RDMA_COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];
/// Variables of torchrun, which are there together.
const TORCHRUN: &[&str] = &["RANK", "WORLD_SIZE"];

/// Returns whether a launcher started this process as one of several ranks.
pub(crate) fn is_launched() -> bool {
    let is_set = |name: &&str| std::env::var_os(name).is_some();
    LAUNCHED.iter().any(is_set) || TORCHRUN.iter().all(is_set)
}

/// Works as a rank that this command started. The reports, also of failures, go to the process that did so.
pub(crate) fn work_as_child(options: &Options, place: &str) -> Result<(), Failure> {
    let place = Place::parse(place)?;
    place.take()?;
    if let Some(batch) = &place.batch {
        return kills::work_as_child(&place, batch);
    }
    let mut sink = Parent { first: place.rank == 0 };
    let launches = place.addresses.iter().map(|address| Launch::new(place.rank, place.size, address.clone()));
    let result = work(options, launches.collect(), place.core.is_some(), &mut sink);
    match result {
        Ok(wrong) => sink.report(Report::Done { wrong }),
        Err(failure) => sink.report(Report::Failed { reason: failure.with_causes() }),
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
    let mut launches = Vec::new();
    for index in 0..options.algorithms().len() {
        launches.push(at_port(&launch, index)?);
    }
    let mut sink = Own { first, ..Own::default() };
    let wrong = work(options, launches, options.pin == Pin::Yes, &mut sink)?;
    sink.report(Report::Done { wrong })?;
    match (first, wrong) {
        (true, _) => Ok(Some(sink.results)),
        (false, 0) => Ok(None),
        (false, wrong) => Err(Failure::run(format!("rank {} found {wrong} wrong elements", launch.rank()))),
    }
}

/// Returns the launch of another communicator of the same ranks: its port is `index` higher.
fn at_port(launch: &Launch, index: usize) -> Result<Launch, Failure> {
    let refused = || {
        Failure::usage(format!("the address {:?} has no port for {} more groups", launch.address(), index))
    };
    let (host, port) = launch.address().rsplit_once(':').ok_or_else(refused)?;
    let port = port.parse::<u16>().ok().and_then(|port| port.checked_add(u16::try_from(index).ok()?));
    let address = format!("{host}:{}", port.ok_or_else(refused)?);
    Ok(Launch::new(launch.rank(), launch.size(), address).with_job(format!("{} {index}", launch.job())))
}

/// Connects and measures all cells. Returns the number of wrong elements of this rank.
fn work(
    options: &Options,
    launches: Vec<Launch>,
    own_cores: bool,
    sink: &mut dyn Sink,
) -> Result<u64, Failure> {
    let size = launches.first().map_or(1, Launch::size);
    let cells = options.cells(size)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| Failure::run("can't start the runtime").because(error))?;
    let _context = runtime.enter();
    let mut groups = Vec::new();
    for (launch, algorithm) in launches.into_iter().zip(options.algorithms()) {
        groups.push(Group::connect(&runtime, launch, algorithm)?);
    }
    for group in groups.iter().filter(|group| group.is_auto()) {
        sink.report(Report::Plans(Plans { ranks: size, text: group.plans() }))?;
    }
    let mut meter = Meter { groups: &groups, own_cores, check: options.tuner_check, wrong: 0 };
    for cell in &cells {
        let figures = meter.cell(cell, sink)?;
        report(options, size, cell, &groups, &figures, sink)?;
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
    sink: &mut dyn Sink,
) -> Result<(), Failure> {
    let sides = || groups.iter().map(Group::algorithm).zip(figures);
    for (algorithm, figures) in sides().filter(|(_, figures)| figures.operations > 0) {
        sink.report(Report::Row(Row::new(ranks, cell, algorithm, &figures.latencies, figures.errors)))?;
        if options.counters {
            let each = |bytes: u64| bytes as f64 / figures.operations as f64;
            sink.report(Report::Counted(Counted {
                ranks,
                bytes: cell.bytes,
                algorithm,
                kind: cell.kind,
                operand: cell.operand,
                operations: figures.operations,
                moved_bytes: each(figures.moved.bytes),
                copied_bytes: each(figures.moved.copied),
            }))?;
        }
    }
    if options.tuner_check {
        let middle = |figures: &Figures| (figures.operations > 0).then(|| median(&figures.latencies));
        let of = |auto: bool| sides().filter(move |(algorithm, _)| (*algorithm == Algorithm::Auto) == auto);
        let auto_us = of(true).find_map(|(_, figures)| middle(figures)).unwrap_or(0.0);
        let fixed_us = of(false).map(|(algorithm, figures)| (algorithm, middle(figures))).collect();
        sink.report(Report::Compared(Compared { ranks, bytes: cell.bytes, auto_us, fixed_us }))?;
    }
    Ok(())
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
