//! One peer in one direction: servers and bridges are started, the cases run, and all is ended.

use std::time::Duration;

use tokio::process::Command;

use crate::Failure;
use crate::bridge::Bridge;
use crate::direction::{Direction, Side};
use crate::options::Plan;
use crate::outcome::{Outcome, Outcomes, read};
use crate::peer::{Manner, Peer};
use crate::process::{self, Running};

/// Clients give a case 30 s themselves; one that does not is killed.
const CASE: Duration = Duration::from_secs(40);
/// All cases of a client that runs them one after the other.
const ALL: Duration = Duration::from_secs(300);

/// What stands between the client and the cases' answers, as long as this lives.
struct Stage {
    server: Running,
    bridges: Vec<Bridge>,
    /// Where the client goes.
    port: u16,
}

/// Runs the cases.
///
/// # Errors
/// What is needed for them did not start, or no RDMA was used where it had to be: no case counts as passed then.
pub(crate) async fn run(plan: &Plan, peer: Peer, direction: Direction) -> Result<Outcomes, Failure> {
    let mut stage = Stage::set(plan, peer, direction).await?;
    let (cases, lacking): (Vec<_>, Vec<_>) =
        plan.cases.iter().cloned().partition(|case| peer.lacks(direction.side(), case).is_none());
    let mut outcomes = if direction.side() == Side::Client && peer.manner() == Manner::Official {
        one_by_one(plan, peer, stage.port, &cases).await?
    } else {
        let mut client = client(plan, peer, direction, stage.port, &cases.join(","));
        let ended = process::finish("the client", &mut client, ALL).await?;
        read(&ended.output, &cases, &format!("the client told nothing of it: {}", ended.describe()))
    };
    if !cases.is_empty() {
        stage.prove().await?;
    }
    stage.explain(&mut outcomes).await;
    let lacking = lacking.into_iter().filter_map(|case| {
        let reason = peer.lacks(direction.side(), &case)?;
        Some((case, Outcome::NotApplicable(reason)))
    });
    outcomes.extend(lacking);
    Ok(outcomes)
}

/// Official clients take a case a process.
async fn one_by_one(plan: &Plan, peer: Peer, port: u16, cases: &[String]) -> Result<Outcomes, Failure> {
    let mut outcomes = Outcomes::new();
    for case in cases {
        let ended = process::finish("the client", &mut peer.client(plan, port, case), CASE).await?;
        let outcome = if ended.succeeded() { Outcome::Passed } else { Outcome::Failed(ended.describe()) };
        outcomes.insert(case.clone(), outcome);
    }
    Ok(outcomes)
}

fn client(plan: &Plan, peer: Peer, direction: Direction, port: u16, cases: &str) -> Command {
    if direction.side() == Side::Client {
        return peer.client(plan, port, cases);
    }
    let mut command = Command::new(&plan.interop);
    command.arg("client").arg(format!("--server_port={port}")).arg(format!("--test_case={cases}"));
    match direction {
        Direction::TcpTonic => command.arg("--transport=tcp"),
        // That it looked for RDMA and found none.
        Direction::Fallback => command.args(["--transport=rdma", "--require=tcp"]),
        _ => command.args(["--transport=rdma", "--require=rdma"]),
    };
    command.envs(plan.rdma());
    command
}

impl Stage {
    async fn set(plan: &Plan, peer: Peer, direction: Direction) -> Result<Self, Failure> {
        let (server, mut port) = match direction {
            Direction::TonicTcp | Direction::Bridges => our_server(plan, "tcp").await?,
            Direction::Direct | Direction::Bridge | Direction::Ours => our_server(plan, "rdma").await?,
            Direction::TcpTonic | Direction::FromBridge | Direction::Fallback => {
                stock_server(plan, peer).await?
            }
        };
        let mut bridges = Vec::new();
        if matches!(direction, Direction::Bridges | Direction::FromBridge) {
            bridges.push(Bridge::from_rdma(plan, port).await?);
        }
        port = bridges.last().map_or(port, |bridge| bridge.port);
        if matches!(direction, Direction::Bridge | Direction::Bridges) {
            bridges.push(Bridge::to_rdma(plan, port).await?);
        }
        port = bridges.last().map_or(port, |bridge| bridge.port);
        Ok(Self { server, bridges, port })
    }

    async fn prove(&mut self) -> Result<(), Failure> {
        for bridge in &mut self.bridges {
            bridge.prove().await?;
        }
        Ok(())
    }

    /// Adds to what failed what the servers said, which may tell why.
    async fn explain(&mut self, outcomes: &mut Outcomes) {
        let Some(first) = outcomes.values_mut().find_map(|outcome| match outcome {
            Outcome::Failed(reason) => Some(reason),
            _ => None,
        }) else {
            return;
        };
        *first += &format!(" [server: {}]", self.server.errors().await);
        for bridge in &mut self.bridges {
            *first += &format!(" [bridge: {}]", bridge.log().await);
        }
    }
}

async fn our_server(plan: &Plan, transport: &str) -> Result<(Running, u16), Failure> {
    let mut command = Command::new(&plan.interop);
    command.args(["server", "--port=0"]).arg(format!("--transport={transport}")).envs(plan.rdma());
    listening(Running::start("our server", &mut command).await?)
}

async fn stock_server(plan: &Plan, peer: Peer) -> Result<(Running, u16), Failure> {
    let name = format!("{peer}'s server");
    match peer.manner() {
        Manner::Ours => listening(Running::start(&name, &mut peer.server(plan, 0)).await?),
        Manner::Official => {
            let port = process::free_port()?;
            Ok((Running::start_silent(&name, &mut peer.server(plan, port), port).await?, port))
        }
    }
}

fn listening((running, line): (Running, String)) -> Result<(Running, u16), Failure> {
    match line.parse() {
        Ok(port @ 1..) => Ok((running, port)),
        _ => Err(format!("a server began with {line:?}, which is no port").into()),
    }
}
