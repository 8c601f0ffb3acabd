//! One part of a job: carries out the commands of the coordinator.

use std::io::{self, BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use tonic_rdma_graph::placement::Part as PartNumber;
use tonic_rdma_graph::session::{Listener, Peering, Session, Settings};
use tonic_rdma_graph::transfer::Mode;

use super::messages::{Command, Job, Report};
use super::samples::{Dataset, Feeder};
use super::trainer::{Trainer, hash};
use crate::failure::Failure;
use crate::step::Shape;
use crate::variables::Variables;

/// How long the other parts may take to learn that this one leaves.
const LEAVE: Duration = Duration::from_secs(2);

/// How often this process says that it runs.
pub(super) const ALIVE: Duration = Duration::from_secs(10);

/// A part, between two commands.
struct Part {
    job: Job,
    modes: Vec<Mode>,
    listener: Option<Listener>,
    connection: Option<Connection>,
    dataset: Option<Arc<Dataset>>,
    /// The variables of each mode.
    variables: Vec<Arc<Variables>>,
}

/// The trainers of all modes. They are dropped before the session.
struct Connection {
    trainers: Vec<Trainer>,
    session: Session,
    shape: Shape,
}

/// Carries out commands until stdin ends.
pub(crate) fn serve(job: Job) -> Result<(), Failure> {
    let modes = job.modes.iter().map(|mode| mode.parse()).collect::<Result<Vec<Mode>, _>>();
    let modes = modes.map_err(Failure::usage)?;
    warm_up()?;
    let mut part =
        Part { job, modes, listener: None, connection: None, dataset: None, variables: Vec::new() };
    let failed = |error: io::Error| Failure::run("can't talk with the coordinator").because(error);
    say_alive().map_err(failed)?;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(failed)?;
        let command = serde_json::from_str(&line)
            .map_err(|error| Failure::run("the coordinator sent no command").because(error))?;
        let report = part
            .carry_out(command)
            .unwrap_or_else(|failure| Report::Failed { reason: failure.with_causes() });
        tell(&report).map_err(failed)?;
    }
    part.disconnect();
    Ok(())
}

/// Writes a report.
fn tell(report: &Report) -> io::Result<()> {
    let text = serde_json::to_string(report)?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush())
}

/// Says now and then that this process runs, until the coordinator is gone.
fn say_alive() -> io::Result<()> {
    let speak = || {
        while tell(&Report::Alive).is_ok() {
            thread::sleep(ALIVE);
        }
    };
    thread::Builder::new().name("alive".to_owned()).spawn(speak).map(drop)
}

/// Multiplies two matrices. candle's products of matrices allocate memory once in each thread, which is no part of any node.
fn warm_up() -> Result<(), Failure> {
    let matrix = Tensor::ones((256, 256), DType::F32, &Device::Cpu)?;
    matrix.matmul(&matrix.t()?)?;
    Ok(())
}

impl Part {
    fn carry_out(&mut self, command: Command) -> Result<Report, Failure> {
        Ok(match command {
            Command::Listen => {
                self.disconnect();
                let settings =
                    Settings::from_env().map_err(|error| Failure::run("bad settings").because(error))?;
                let listener = Listener::bind("127.0.0.1:0", settings)
                    .map_err(|error| Failure::run("can't listen for the other parts").because(error))?;
                let address = listener.address().to_string();
                self.listener = Some(listener);
                Report::Listening { address }
            }
            Command::Connect { shape, part, peers, version } => {
                Report::Connected { parameters: self.connect(shape, part, peers, version)? }
            }
            Command::Run { mode, from, to } => {
                let name = self.name(mode);
                let trainer = self.connection()?.trainers.get_mut(mode).ok_or_else(|| no_mode(mode))?;
                let ran = trainer.run(from..to);
                Report::Ran(ran.map_err(|error| {
                    Failure::run(format!("steps {from} to {to} in mode {name}")).because(error)
                })?)
            }
            Command::Complete { mode } => {
                self.disconnect();
                Report::Complete { version: self.variables(mode)?.complete().map_err(kept)? }
            }
            Command::Hash { mode } => {
                let variables = self.settled(mode)?;
                Report::Hash { weights: hash(&variables).map_err(kept)? }
            }
            Command::Test { mode } => {
                let values = self.settled(mode)?.values().map_err(kept)?;
                let model = self.connection()?.shape.model;
                let dataset =
                    self.dataset.as_ref().ok_or_else(|| Failure::run("the samples were not read"))?;
                let (loss, accuracy) = dataset
                    .test(&model, &values, self.job.tested)
                    .map_err(|error| Failure::run("can't test the weights").because(error))?;
                Report::Tested { loss, accuracy }
            }
            Command::Sent { mode } => {
                let trainer = self.connection()?.trainers.get(mode).ok_or_else(|| no_mode(mode))?;
                Report::Sent(trainer.sent_tensors())
            }
        })
    }

    fn connect(
        &mut self,
        shape: Shape,
        part: usize,
        peers: Vec<String>,
        version: u64,
    ) -> Result<usize, Failure> {
        let dataset = match self.dataset.take() {
            Some(dataset) => dataset,
            None => Arc::new(Dataset::read(&shape.model, Path::new(&self.job.data), self.job.length)?),
        };
        self.dataset = Some(Arc::clone(&dataset));
        if self.variables.is_empty() {
            for _ in &self.modes {
                let variables = shape.variables(part, self.job.seed)?;
                self.variables
                    .push(Variables::new(variables, self.job.rate, self.job.momentum).map_err(kept)?);
            }
        } else {
            self.variables.iter().try_for_each(|variables| variables.settle(version)).map_err(kept)?;
        }
        let failed = |error: tonic_rdma_graph::GraphError| {
            Failure::run(format!("can't connect {} to the other parts", shape.name(part))).because(error)
        };
        let graphs = self.variables.iter().map(|variables| shape.build(part, variables));
        let graphs = graphs.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let listener = self.listener.take().ok_or_else(|| Failure::run("this part does not listen"))?;
        let first = graphs.first().ok_or_else(|| Failure::usage("there is no mode"))?;
        let mut peering = Peering::new(PartNumber(part), peers, &first.graph, &first.placements);
        peering.modes.clone_from(&self.modes);
        peering.timeout = Duration::from_secs_f64(self.job.deadline);
        let session = listener.connect(peering).map_err(failed)?;
        let mut trainers = Vec::new();
        for (graph, mode) in graphs.into_iter().zip(&self.modes) {
            let transfers = session.transfers(*mode).map_err(failed)?;
            let feeder = Feeder::new(Arc::clone(&dataset), shape.clone(), self.job.seed);
            let deadline = Duration::from_secs_f64(self.job.deadline);
            let trainer = Trainer::new(graph, part, transfers, feeder, self.job.registered, deadline);
            trainers.push(trainer.map_err(failed)?);
        }
        let parameters = shape.parameters();
        self.connection = Some(Connection { trainers, session, shape });
        Ok(parameters)
    }

    /// Leaves the other parts.
    fn disconnect(&mut self) {
        if let Some(Connection { trainers, session, .. }) = self.connection.take() {
            drop(trainers);
            session.leave(LEAVE);
        }
    }

    fn connection(&mut self) -> Result<&mut Connection, Failure> {
        self.connection.as_mut().ok_or_else(|| Failure::run("this part is not connected"))
    }

    fn variables(&self, mode: usize) -> Result<&Arc<Variables>, Failure> {
        self.variables.get(mode).ok_or_else(|| no_mode(mode))
    }

    /// Returns the variables of a mode after the last step.
    fn settled(&self, mode: usize) -> Result<Arc<Variables>, Failure> {
        let variables = self.variables(mode)?;
        variables.settle(variables.complete().map_err(kept)?).map_err(kept)?;
        Ok(Arc::clone(variables))
    }

    fn name(&self, mode: usize) -> String {
        self.job.modes.get(mode).cloned().unwrap_or_default()
    }
}

fn no_mode(mode: usize) -> Failure {
    Failure::run(format!("there is no mode {mode}"))
}

fn kept(error: tonic_rdma_graph::dataflow::KernelError) -> Failure {
    Failure::run("the variables can't be used").because(error)
}
