//! The service of a part: it takes the orders of a coordinator, and a thread carries them out.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::thread;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma_commands::Failure;
use tonic_rdma_graph::schedule::Stop;

use super::running::Running;
use crate::control::proto;
use crate::control::proto::part_server::Part;
use crate::control::{Order, Report, read, text};

/// The number of orders, and of reports, that may wait.
const WAITING: usize = 8;
/// The largest model that is taken.
const LARGEST_MODEL: usize = 4 << 30;

/// The service.
#[derive(Debug)]
pub(super) struct PartService {
    /// The address at which other parts can connect.
    address: IpAddr,
    /// A part serves one coordinator at a time, so that times mean something.
    free: Arc<Semaphore>,
}

impl PartService {
    /// Makes the service of a part that other parts find at `address`.
    pub(super) fn new(address: IpAddr) -> Self {
        Self { address, free: Arc::new(Semaphore::new(1)) }
    }
}

/// The reports of a part.
type Reports = Pin<Box<dyn Stream<Item = Result<proto::Report, Status>> + Send>>;

#[tonic::async_trait]
impl Part for PartService {
    type WorkStream = Reports;

    async fn work(&self, request: Request<Streaming<proto::Order>>) -> Result<Response<Reports>, Status> {
        let permit = Arc::clone(&self.free).try_acquire_owned();
        let permit =
            permit.map_err(|_| Status::unavailable("it works for another coordinator; try again later"))?;
        let (sender, orders) = mpsc::channel(WAITING);
        let (reports, answers) = mpsc::channel(WAITING);
        let stop = Arc::new(OnceLock::<Stop>::new());
        let job = Job { address: self.address, orders, reports: reports.clone(), stop: Arc::clone(&stop) };
        // The thread sees the end of the orders, also where it waits for other parts.
        tokio::spawn(async move {
            if let Err(failure) = pass(request.into_inner(), &sender).await {
                let _ = reports.send(Err(Status::invalid_argument(failure.with_causes()))).await;
            }
            if let Some(stop) = stop.get() {
                stop.stop();
            }
        });
        let work = move || {
            job.run();
            drop(permit);
        };
        thread::Builder::new()
            .name("part".to_owned())
            .spawn(work)
            .map_err(|error| Status::resource_exhausted(format!("can't start a thread: {error}")))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }
}

/// Passes orders on until the stream ends.
async fn pass(
    mut orders: Streaming<proto::Order>,
    sender: &mpsc::Sender<(Order, Bytes)>,
) -> Result<(), Failure> {
    // A coordinator that is gone and one that ends look alike: there is no more to do.
    while let Ok(Some(order)) = orders.message().await {
        let read = read(&order.json, "the coordinator")?;
        if sender.send((read, order.content)).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// The work of a part for one coordinator, from the model to the last turn.
#[derive(Debug)]
struct Job {
    address: IpAddr,
    orders: mpsc::Receiver<(Order, Bytes)>,
    reports: mpsc::Sender<Result<proto::Report, Status>>,
    /// Stops the run, once there is one, from another thread.
    stop: Arc<OnceLock<Stop>>,
}

impl Job {
    /// Carries out the orders until they end.
    fn run(mut self) {
        if let Err(failure) = self.work() {
            let usage = failure.is_usage();
            // The coordinator may be gone.
            let _ = self.report(&Report::Failed { reason: failure.with_causes(), usage }, Bytes::new());
        }
    }

    fn work(&mut self) -> Result<(), Failure> {
        let mut model = Vec::new();
        let job = loop {
            match self.orders.blocking_recv() {
                Some((Order::Model, content)) if model.len() + content.len() <= LARGEST_MODEL => {
                    model.extend_from_slice(&content);
                }
                Some((Order::Model, _)) => {
                    return Err(Failure::usage(format!("the model has more than {LARGEST_MODEL} bytes")));
                }
                Some((Order::Load(job), _)) => break job,
                Some((other, _)) => return Err(misplaced("early", &other)),
                None => return Ok(()),
            }
        };
        let running = Running::start(job, &model, self.address, |port| {
            self.report(&Report::Loaded { port }, Bytes::new())?;
            match self.orders.blocking_recv() {
                Some((Order::Connect { peers }, _)) => Ok(Some(peers)),
                Some((other, _)) => Err(misplaced("early", &other)),
                None => Ok(None),
            }
        })?;
        drop(model);
        let Some(mut running) = running else { return Ok(()) };
        let _ = self.stop.set(running.stop());
        let static_addresses = running.static_addresses();
        self.report(&Report::Connected { static_addresses }, Bytes::new())?;
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
                other => return Err(misplaced("late", &other)),
            }
        }
        Ok(())
    }

    fn report(&self, report: &Report, content: Bytes) -> Result<(), Failure> {
        let message = proto::Report { json: text(report)?, content };
        self.reports.blocking_send(Ok(message)).map_err(|_| Failure::run("the coordinator is gone"))
    }
}

fn misplaced(when: &str, order: &Order) -> Failure {
    Failure::run(format!("an order came too {when}: {order:?}"))
}
