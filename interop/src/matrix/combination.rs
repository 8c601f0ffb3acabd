//! Runs the cases of one peer in one direction, with the servers and bridges that they need.

use std::process::Command;
use std::time::Duration;

use tonic_rdma_commands::Failure;

use crate::bridge::Bridge;
use crate::direction::{Direction, Role};
use crate::outcome::{NO_LINE, Outcome, Outcomes, SERVER_OUTPUT, printable, read};
use crate::peer::{CommandLine, Peer};
use crate::plan::Plan;
use crate::process::{self, RunningProgram};
use crate::tls::{ClientFault, Tls};

/// Time limit of one case. Most clients end a case after 30 s themselves. This limit ends all other clients.
const CASE: Duration = Duration::from_secs(40);
/// Time limit of a client that runs all cases one after the other.
const ALL: Duration = Duration::from_secs(300);

/// The case with a single call, for connections that have to be refused and for the peer's name.
const SINGLE_CALL: &str = "empty_unary";

/// The servers and bridges of one combination. Dropping it ends them.
struct Combination<'a> {
    plan: &'a Plan,
    peer: Peer,
    direction: Direction,
    /// Certificates, if the direction has TLS.
    tls: Option<Tls>,
    server: RunningProgram,
    bridges: Vec<Bridge>,
    /// Port that the client connects to.
    port: u16,
}

/// Runs the cases.
///
/// # Errors
/// A program did not start, or a connection did not use RDMA although it had to. No case counts as passed
/// then.
pub(crate) fn run(plan: &Plan, peer: Peer, direction: Direction) -> Result<Outcomes, Failure> {
    if let Some(reason) = peer.lacks_tls(&plan.paths).filter(|_| direction.has_tls()) {
        let cases = plan.cases(peer, direction).into_iter();
        return Ok(cases.map(|case| (case, Outcome::NotApplicable(reason.clone()))).collect());
    }
    let mut combination = Combination::start(plan, peer, direction)?;
    let (cases, lacking): (Vec<_>, Vec<_>) = plan
        .cases(peer, direction)
        .into_iter()
        .partition(|case| peer.lacks(direction.role(), case).is_none());
    let mut outcomes = combination.call(&cases, None)?;
    outcomes.extend(combination.refusals()?);
    if !cases.is_empty() {
        combination.check_rdma()?;
    }
    combination.explain(&mut outcomes);
    let lacking = lacking.into_iter().filter_map(|case| {
        let reason = peer.lacks(direction.role(), &case)?;
        Some((case, Outcome::NotApplicable(reason)))
    });
    outcomes.extend(lacking);
    Ok(outcomes)
}

/// Returns the name that the peer's client sends: its library and version.
///
/// # Errors
/// The client made no call, or sent no name.
pub(crate) fn name(plan: &Plan, peer: Peer) -> Result<String, Failure> {
    let (mut server, port) = our_server(plan, None, "tcp")?;
    let called = process::finish(
        "the client",
        peer.client(&plan.paths, port, SINGLE_CALL, Direction::TonicTcp),
        CASE,
    )?;
    let log = server.log();
    let name = log.lines().find_map(|line| line.strip_prefix("called by "));
    match name {
        Some(name) if called.succeeded() => Ok(printable(name)),
        Some(_) => Err(process::describe(&called).into()),
        None => Err(format!("the client sent the server no name; {}", process::describe(&called)).into()),
    }
}

impl<'a> Combination<'a> {
    fn start(plan: &'a Plan, peer: Peer, direction: Direction) -> Result<Self, Failure> {
        let certificates = plan.certificates.as_ref().filter(|_| direction.has_tls());
        let tls = certificates.map(|certificates| Tls::new(&plan.paths, certificates, peer));
        let (server, mut port) = match direction.without_tls() {
            Direction::TonicTcp | Direction::Bridges => our_server(plan, tls.as_ref(), "tcp")?,
            Direction::Ours | Direction::OursNative if peer == Peer::PythonRdma => {
                stock_server(plan, tls.as_ref(), peer)?
            }
            Direction::Direct | Direction::Bridge | Direction::Ours => {
                our_server(plan, tls.as_ref(), "rdma")?
            }
            Direction::DirectNative | Direction::OursNative => our_server(plan, tls.as_ref(), "native")?,
            _ => stock_server(plan, tls.as_ref(), peer)?,
        };
        let mut bridges = Vec::new();
        if matches!(direction.without_tls(), Direction::Bridges | Direction::FromBridge) {
            bridges.push(Bridge::from_rdma(plan, port)?);
        }
        port = bridges.last().map_or(port, |bridge| bridge.port);
        if matches!(direction.without_tls(), Direction::Bridge | Direction::Bridges) {
            bridges.push(Bridge::to_rdma(plan, port)?);
        }
        port = bridges.last().map_or(port, |bridge| bridge.port);
        Ok(Self { plan, peer, direction, tls, server, bridges, port })
    }

    /// Runs the cases. The client has the `fault` in all of them.
    fn call(&self, cases: &[String], fault: Option<ClientFault>) -> Result<Outcomes, Failure> {
        if self.command_line() == CommandLine::Official {
            return self.one_by_one(cases, fault);
        }
        let ended = process::finish("the client", self.client(&cases.join(","), fault), ALL)?;
        let otherwise = format!("{NO_LINE}: {}", process::describe(&ended));
        Ok(read(&ended.output, cases, &otherwise))
    }

    /// Runs the cases of an official client, one process for each case.
    fn one_by_one(&self, cases: &[String], fault: Option<ClientFault>) -> Result<Outcomes, Failure> {
        let mut outcomes = Outcomes::new();
        for case in cases {
            let ended = process::finish("the client", self.client(case, fault), CASE)?;
            let proof = if self.direction.role() == Role::Client { self.peer.proof(case) } else { None };
            let outcome = match proof {
                _ if !ended.succeeded() => Outcome::Failed(process::describe(&ended)),
                Some(proof) if !ended.errors.contains(proof) => Outcome::Failed(format!(
                    "it ended without {proof:?} in its log: {}",
                    process::describe(&ended)
                )),
                _ => Outcome::Passed,
            };
            outcomes.insert(case.clone(), outcome);
        }
        Ok(outcomes)
    }

    /// Checks, with TLS, that the server or the client refuses connections with each fault.
    fn refusals(&self) -> Result<Outcomes, Failure> {
        let mut outcomes = Outcomes::new();
        let Some(tls) = &self.tls else { return Ok(outcomes) };
        for fault in ClientFault::ALL {
            let outcome = match tls.lacks(self.command_line(), fault) {
                Some(reason) => Outcome::NotApplicable(reason.to_owned()),
                None => {
                    let mut called = self.call(&[SINGLE_CALL.to_owned()], Some(fault))?;
                    fault.judge(called.remove(SINGLE_CALL).ok_or("the client was not run")?)
                }
            };
            outcomes.insert(fault.name().to_owned(), outcome);
        }
        Ok(outcomes)
    }

    /// Returns the command line that the client's program takes.
    fn command_line(&self) -> CommandLine {
        if self.direction.role() == Role::Client { self.peer.command_line() } else { CommandLine::Ours }
    }

    fn client(&self, cases: &str, fault: Option<ClientFault>) -> Command {
        let mut command = match self.direction.role() {
            Role::Client => {
                let mut client = self.peer.client(&self.plan.paths, self.port, cases, self.direction);
                client.envs(self.plan.rdma()); // for our package for Python
                client
            }
            Role::Server => self.our_client(cases),
        };
        if let Some(tls) = &self.tls {
            command.args(tls.client(self.command_line(), fault));
        }
        command
    }

    fn our_client(&self, cases: &str) -> Command {
        let mut command = Command::new(&self.plan.paths.interop);
        command.arg("client").arg(format!("--server_port={}", self.port)).arg(format!("--test_case={cases}"));
        match self.direction.without_tls() {
            Direction::TcpTonic => command.arg("--transport=tcp"),
            // The client asks for RDMA, and has to fall back to TCP.
            Direction::Fallback => command.args(["--transport=rdma", "--require=tcp"]),
            Direction::OursNative => command
                .args(["--transport=native", "--require=native"])
                .arg(format!("--require-device={}", self.plan.device())),
            _ => command
                .args(["--transport=rdma", "--require=rdma"])
                .arg(format!("--require-device={}", self.plan.device())),
        };
        command.envs(self.plan.rdma());
        command
    }

    fn check_rdma(&mut self) -> Result<(), Failure> {
        for bridge in &mut self.bridges {
            bridge.check_rdma()?;
        }
        Ok(())
    }

    /// Adds the output of servers and bridges to the first failure, because it may have the cause.
    fn explain(&mut self, outcomes: &mut Outcomes) {
        let Some(first) = outcomes.values_mut().find_map(|outcome| match outcome {
            Outcome::Failed(reason) => Some(reason),
            _ => None,
        }) else {
            return;
        };
        *first += &format!("{SERVER_OUTPUT}{}]", self.server.errors());
        for bridge in &mut self.bridges {
            *first += &format!(" [bridge: {}]", bridge.log());
        }
    }
}

fn our_server(plan: &Plan, tls: Option<&Tls>, transport: &str) -> Result<(RunningProgram, u16), Failure> {
    let mut command = Command::new(&plan.paths.interop);
    command.args(["server", "--port=0"]).arg(format!("--transport={transport}")).envs(plan.rdma());
    command.args(tls.map(|tls| tls.server(CommandLine::Ours)).unwrap_or_default());
    listening(RunningProgram::start("our server", command)?)
}

fn stock_server(plan: &Plan, tls: Option<&Tls>, peer: Peer) -> Result<(RunningProgram, u16), Failure> {
    let name = format!("{peer}'s server");
    let port = if peer.command_line() == CommandLine::Official { process::free_port()? } else { 0 };
    let mut command = peer.server(&plan.paths, port);
    command.envs(plan.rdma()); // for our package for Python
    command.args(tls.map(|tls| tls.server(peer.command_line())).unwrap_or_default());
    match peer.command_line() {
        CommandLine::Ours => listening(RunningProgram::start(&name, command)?),
        CommandLine::Official => Ok((RunningProgram::start_silent(&name, command, port)?, port)),
    }
}

fn listening((running, line): (RunningProgram, String)) -> Result<(RunningProgram, u16), Failure> {
    match line.parse() {
        Ok(port @ 1..) => Ok((running, port)),
        _ => Err(format!("a server began with {line:?}, which is no port").into()),
    }
}
