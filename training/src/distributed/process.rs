//! One part of a job: carries out the commands of the coordinator.

use std::io::{self, BufRead as _};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, to_value};
use tonic_rdma_commands::process;
use tonic_rdma_graph::placement::Part as PartNumber;
use tonic_rdma_graph::session::{Listener, Peering, Session, Settings};

use super::messages::{Command, Report};
use super::trainer::{Feeder, Trainer};
use crate::data::Data;
use crate::options::Options;
use crate::step::Shape;
use crate::variables::Variables;
use crate::{Error, failure};
use tonic_rdma_commands::{Context as _, Failure};

/// How long the other parts may take to learn that this one leaves.
const LEAVE: Duration = Duration::from_secs(2);

/// How often this process says that it runs.
pub(super) const ALIVE: Duration = Duration::from_secs(10);

/// A part, between two commands.
struct Part {
    job: Options,
    data: Arc<Data>,
    listener: Option<Listener>,
    connection: Option<Connection>,
    /// The variables of each mode.
    variables: Vec<Arc<Variables>>,
}

/// The trainers of all modes. They are dropped before the session.
struct Connection {
    trainers: Vec<Trainer>,
    session: Session,
}

/// Carries out commands until stdin ends.
pub(crate) fn serve(job: Options) -> Result<(), Failure> {
    // candle's products of matrices allocate memory once in each thread, which is no part of any node.
    let warm_up =
        || Tensor::ones((256, 256), DType::F32, &Device::Cpu).and_then(|ones| ones.matmul(&ones.t()?));
    warm_up().context("candle can't compute")?;
    let talk = "can't talk with the coordinator";
    say_alive().context(talk)?;
    let data = Arc::new(job.samples()?);
    let mut part = Part { job, data, listener: None, connection: None, variables: Vec::new() };
    for line in io::stdin().lock().lines() {
        let command =
            serde_json::from_str(&line.context(talk)?).context("the coordinator sent no command")?;
        let report = match part.carry_out(command) {
            Ok(value) => Report::Done(value),
            Err(error) => Report::Failed(failure(error).with_causes()),
        };
        process::report(&report)?;
    }
    part.disconnect();
    Ok(())
}

/// Says now and then that this process runs, until the coordinator is gone.
fn say_alive() -> io::Result<()> {
    let speak = || {
        while process::report(&Report::Alive).is_ok() {
            thread::sleep(ALIVE);
        }
    };
    thread::Builder::new().name("alive".to_owned()).spawn(speak).map(drop)
}

impl Part {
    fn carry_out(&mut self, command: Command) -> Result<Value, Error> {
        Ok(match command {
            Command::Listen => {
                self.disconnect();
                let listener = Listener::bind("127.0.0.1:0", Settings::from_env()?)
                    .context("can't listen for the other parts")?;
                let address = listener.address().to_string();
                self.listener = Some(listener);
                to_value(address)?
            }
            Command::Connect { shape, part, peers, version } => {
                self.connect(&shape, part, peers, version)
                    .context(format!("can't connect {} to the other parts", shape.name(part)))?;
                Value::Null
            }
            Command::Run { mode, from, to } => {
                let name = self.job.mode.get(mode).cloned().unwrap_or_default();
                let trainer = self.trainers()?.get_mut(mode).ok_or("there is no such mode")?;
                to_value(trainer.run(from..to).context(format!("steps {from} to {to} in mode {name}"))?)?
            }
            Command::Complete => {
                self.disconnect();
                let complete = self.variables.iter().map(|variables| variables.complete());
                to_value(complete.collect::<Result<Vec<_>, _>>()?.into_iter().min())?
            }
            Command::Hash => {
                let hash = |variables: &Arc<Variables>| Ok(format!("{:016x}", variables.hash()?));
                to_value(self.settled()?.iter().map(hash).collect::<Result<Vec<_>, Error>>()?)?
            }
            Command::Test => {
                let values = self.settled()?.first().ok_or("there is no mode")?.values()?;
                let samples = &self.data.test;
                let which = 0..self.job.test_samples.min(samples.len());
                let [loss, correct, number] = self.job.model.test(&values, samples, which)?;
                to_value((loss / number.max(1.0), correct / number.max(1.0)))?
            }
            Command::Sent => {
                to_value(self.trainers()?.iter().map(Trainer::sent_tensors).collect::<Vec<_>>())?
            }
        })
    }

    fn connect(&mut self, shape: &Shape, part: usize, peers: Vec<String>, version: u64) -> Result<(), Error> {
        let modes = self.job.modes()?;
        if self.variables.is_empty() {
            for _ in &modes {
                let variables = shape.variables(part, self.job.seed);
                self.variables.push(Variables::new(variables, self.job.rate(), self.job.momentum)?);
            }
        } else {
            self.variables.iter().try_for_each(|variables| variables.settle(version))?;
        }
        let graphs = self.variables.iter().map(|variables| shape.build(part, variables));
        let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
        let listener = self.listener.take().ok_or("this part does not listen")?;
        let first = graphs.first().ok_or("there is no mode")?;
        let mut peering = Peering::new(PartNumber(part), peers, &first.graph, &first.placements);
        peering.modes.clone_from(&modes);
        peering.timeout = self.job.deadline;
        let session = listener.connect(peering)?;
        let mut trainers = Vec::new();
        for (graph, mode) in graphs.into_iter().zip(modes) {
            let transfers = session.transfers(mode)?;
            let feeder = Feeder::new(Arc::clone(&self.data), shape.clone(), self.job.seed, &graph);
            trainers.push(Trainer::new(graph, part, transfers, feeder, self.job.deadline)?);
        }
        self.connection = Some(Connection { trainers, session });
        Ok(())
    }

    /// Leaves the other parts.
    fn disconnect(&mut self) {
        if let Some(Connection { trainers, session }) = self.connection.take() {
            drop(trainers);
            session.leave(LEAVE);
        }
    }

    fn trainers(&mut self) -> Result<&mut Vec<Trainer>, Error> {
        let connection = self.connection.as_mut().ok_or("this part is not connected")?;
        Ok(&mut connection.trainers)
    }

    /// Returns the variables of each mode after the last step.
    fn settled(&self) -> Result<&[Arc<Variables>], Error> {
        self.variables.iter().try_for_each(|variables| variables.settle(variables.complete()?))?;
        Ok(&self.variables)
    }
}
