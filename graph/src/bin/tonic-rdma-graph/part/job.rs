//! The work of a part for one coordinator, from the model to the last turn.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;
use tonic_rdma_commands::Failure;
use tonic_rdma_graph::schedule::Stop;

use super::running::{Loaded, Running};
use crate::control::messages::{self, Order, Report};
use crate::control::proto;

/// The largest model that is taken.
const LARGEST_MODEL: usize = 4 << 30;

/// Orders, and reports about them.
#[derive(Debug)]
pub(super) struct Job {
    address: IpAddr,
    orders: mpsc::Receiver<(Order, Bytes)>,
    reports: mpsc::Sender<Result<proto::Report, Status>>,
    stop: JobStop,
}

/// Stops a job from another thread.
#[derive(Clone, Debug, Default)]
pub(super) struct JobStop(Arc<Mutex<Option<Stop>>>);

impl JobStop {
    /// Stops the run, if there is one.
    pub(super) fn stop(&self) {
        if let Some(stop) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            stop.stop();
        }
    }

    fn set(&self, stop: Stop) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stop);
    }
}

impl Job {
    /// Makes a job of these orders. Other parts find this one at `address`.
    pub(super) fn new(
        address: IpAddr,
        orders: mpsc::Receiver<(Order, Bytes)>,
        reports: mpsc::Sender<Result<proto::Report, Status>>,
    ) -> Self {
        Self { address, orders, reports, stop: JobStop::default() }
    }

    /// Returns a handle that stops this job.
    pub(super) fn stop(&self) -> JobStop {
        self.stop.clone()
    }

    /// Carries out the orders until they end.
    pub(super) fn run(mut self) {
        if let Err(failure) = self.work() {
            let usage = failure.is_usage();
            // The coordinator may be gone.
            let _ = self.report(&Report::Failed { reason: failure.with_causes(), usage }, Bytes::new());
        }
    }

    fn work(&mut self) -> Result<(), Failure> {
        let mut model = Vec::new();
        let mut loaded = None;
        while let Some((order, content)) = self.orders.blocking_recv() {
            match order {
                Order::Model if model.len() + content.len() <= LARGEST_MODEL => {
                    model.extend_from_slice(&content)
                }
                Order::Model => {
                    return Err(Failure::usage(format!("the model has more than {LARGEST_MODEL} bytes")));
                }
                Order::Load(job) => {
                    let part = Loaded::load(job, &std::mem::take(&mut model), self.address)?;
                    self.report(&Report::Loaded { port: part.port() }, Bytes::new())?;
                    loaded = Some(part);
                }
                Order::Connect { peers } => {
                    let Some(part) = loaded.take() else {
                        return Err(Failure::run("an order to connect came before the model"));
                    };
                    let running = part.connect(peers)?;
                    self.stop.set(running.stop());
                    self.report(&Report::Connected(running.connected()), Bytes::new())?;
                    return self.turns(running);
                }
                other => return Err(Failure::run(format!("an order came too early: {other:?}"))),
            }
        }
        Ok(())
    }

    fn turns(&mut self, mut running: Running) -> Result<(), Failure> {
        while let Some((order, _)) = self.orders.blocking_recv() {
            match order {
                Order::Expect(expected) => {
                    running.expect(expected);
                    self.report(&Report::Ready, Bytes::new())?;
                }
                Order::Run(turn) => {
                    let (done, difference) = running.run(&turn)?;
                    if let Some((differs, content)) = difference {
                        self.report(&Report::Differs(differs), content)?;
                    }
                    self.report(&Report::Done(done), Bytes::new())?;
                }
                Order::Describe => self.report(&Report::Tensors(running.describe()), Bytes::new())?,
                other => return Err(Failure::run(format!("an order came too late: {other:?}"))),
            }
        }
        Ok(())
    }

    fn report(&self, report: &Report, content: Bytes) -> Result<(), Failure> {
        let message = messages::report(report, content)?;
        self.reports.blocking_send(Ok(message)).map_err(|_| Failure::run("the coordinator is gone"))
    }
}
