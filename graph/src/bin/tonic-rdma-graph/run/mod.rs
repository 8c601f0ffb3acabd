//! The coordinator: it starts or reaches the parts, has them run turns in each mode, and compares everything with the unsplit model.

mod parts;
mod plan;
mod reference;
mod rounds;

use std::sync::Arc;

use bytes::Bytes;
use tonic_rdma_commands::process::Child;
use tonic_rdma_commands::{Failure, output};
use tonic_rdma_graph::dataflow::Role;
use tonic_rdma_graph::explain::{Explanation, SenderReport};

use crate::control::{Described, Order, Report};
use crate::options::RunOptions;
use crate::output::{ModeRow, Results};
use parts::{Parts, only};
use plan::Plan;
use reference::Reference;
use rounds::Rounds;

/// The number of parts if the command line has none.
const DEFAULT_PARTS: usize = 2;
/// The size of the pieces in which a model goes to the parts.
const PIECE: usize = 1 << 20;

/// Runs a model in parts, shows what was found, and fails if a check did not hold.
pub(crate) fn run(options: &RunOptions) -> Result<(), Failure> {
    let parts = number_of_parts(options)?;
    output::check_files(&[("--json", options.json.as_deref()), ("--plot", options.plot.as_deref())])?;
    if options.nodes {
        return nodes(options);
    }
    let plan = Arc::new(Plan::new(options, parts)?);
    let parts = plan.placements.partition().count();
    let (children, addresses) = match &options.hosts {
        Some(hosts) => (Vec::new(), hosts.0.clone()),
        None => parts::start(parts)?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::run("can't start threads").because(error))?;
    let outcome = runtime.block_on(coordinate(options, &plan, children, &addresses));
    // A run of the unsplit model may still be under way if a part has failed. It is not needed then.
    runtime.shutdown_background();
    let (results, differences) = outcome?;
    results.show(options.explain, options.json.as_deref(), options.plot.as_deref())?;
    verdict(&results, &differences)
}

/// Shows the nodes of the model, as `--cut` and `--assign` name them.
fn nodes(options: &RunOptions) -> Result<(), Failure> {
    let (_, model) = plan::load(options)?;
    let mut text = String::new();
    for (_, node) in model.topology().nodes().filter(|(_, node)| node.role != Role::Constant) {
        let outputs: Vec<String> = node.outputs.iter().map(ToString::to_string).collect();
        text.push_str(&format!("{}  {}  {}\n", node.name, node.kind, outputs.join(", ")));
    }
    output::print(&text, None)
}

fn number_of_parts(options: &RunOptions) -> Result<usize, Failure> {
    let cuts = options.cut.as_ref().map(|cuts| cuts.0.len());
    let parts = options.parts.map(|parts| parts as usize);
    if let (Some(parts), Some(cuts)) = (parts, cuts)
        && parts != cuts + 1
    {
        return Err(Failure::usage(format!(
            "--parts {parts} and the {cuts} nodes of --cut contradict one another: {cuts} cuts make {} parts",
            cuts + 1
        )));
    }
    let asked = cuts.map(|cuts| cuts + 1).or(parts);
    match (asked, &options.hosts) {
        (Some(parts), Some(hosts)) if hosts.0.len() != parts => Err(Failure::usage(format!(
            "--hosts names {} hosts for {parts} parts: name one for each part",
            hosts.0.len()
        ))),
        (None, Some(hosts)) => Ok(hosts.0.len()),
        (parts, _) => Ok(parts.unwrap_or(DEFAULT_PARTS)),
    }
}

async fn coordinate(
    options: &RunOptions,
    plan: &Arc<Plan>,
    children: Vec<Child>,
    addresses: &[String],
) -> Result<(Results, Vec<String>), Failure> {
    let mut parts = Parts::open(children, addresses, options.timeout).await?;
    for part in 0..parts.len() {
        for start in (0..plan.file.len()).step_by(PIECE) {
            let piece = plan.file.slice(start..plan.file.len().min(start + PIECE));
            parts.send(part, &Order::Model, piece).await?;
        }
        parts.send(part, &Order::Load(plan.job(options, part)), Bytes::new()).await?;
    }
    // The parts load the model while this process runs it.
    let reference = {
        let (plan, seed, lengths) = (Arc::clone(plan), options.seed, options.lengths.0.clone());
        tokio::task::spawn_blocking(move || Reference::compute(&plan, seed, &lengths))
    };
    let ports = parts.gather("loaded the model", only!(Report::Loaded { port } => port)).await?;
    let peers = addresses.iter().zip(ports).map(|(address, port)| with_port(address, port)).collect();
    parts.send_all(&Order::Connect { peers }).await?;
    let connected = only!(Report::Connected { static_addresses } => static_addresses);
    let addresses = parts.gather("connected", connected).await?.iter().sum();
    let reference = reference.await.map_err(|error| Failure::run("the unsplit model").because(error))??;
    for part in 0..parts.len() {
        parts.send(part, &Order::Expect(reference.expected(plan, part)?), Bytes::new()).await?;
    }
    parts.gather("took what it has to check", only!(Report::Ready => ())).await?;
    let mut rounds = Rounds::new(options, plan, &reference);
    rounds.run(&mut parts).await?;
    parts.send_all(&Order::Describe).await?;
    let described = parts.gather("described its tensors", only!(Report::Tensors(tensors) => tensors)).await?;
    let differences = std::mem::take(&mut rounds.differences);
    let modes = rounds.rows(&described);
    Ok((results(options, plan, &reference, addresses, &described, modes), differences))
}

/// Gathers the results of a run. `static_addresses` is the number of addresses of static slots that were distributed.
fn results(
    options: &RunOptions,
    plan: &Plan,
    reference: &Reference,
    static_addresses: usize,
    described: &[Described],
    modes: Vec<ModeRow>,
) -> Results {
    let (crossings, partition) = (plan.placements.crossings(), plan.placements.partition());
    let reports: Vec<SenderReport> = described.iter().flat_map(|part| part.tensors.iter().copied()).collect();
    let mut explanation = Explanation::new(plan.model.topology(), &plan.placements, &reports);
    for (tensor, crossing) in explanation.tensors.iter_mut().zip(crossings) {
        tensor.bytes = Some(reference.bytes(crossing.outlet));
    }
    let nodes_of = |part| partition.parts().iter().filter(|owner| owner.0 == part).count();
    Results {
        model: plan.name.clone(),
        parts: partition.count(),
        micro_batches: options.micro_batches,
        receive: options.receive,
        nodes: (0..partition.count()).map(nodes_of).collect(),
        bytes: crossings.iter().map(|crossing| reference.bytes(crossing.outlet)).sum(),
        static_addresses,
        explanation,
        modes,
    }
}

/// Returns the address with another port.
fn with_port(address: &str, port: u16) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    format!("{host}:{port}")
}

/// Fails if a check did not hold.
fn verdict(results: &Results, differences: &[String]) -> Result<(), Failure> {
    let errors: u64 = results.modes.iter().map(|mode| mode.errors).sum();
    let first = differences.first().map(|first| format!("; {first}"));
    if errors == 0 && first.is_none() {
        return Ok(());
    }
    Err(Failure::run(format!("{errors} tensors differ from the unsplit model{}", first.unwrap_or_default())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_gets_another_port() {
        assert_eq!(with_port("host:1", 2), "host:2");
        assert_eq!(with_port("[::1]:50", 70), "[::1]:70");
    }
}
