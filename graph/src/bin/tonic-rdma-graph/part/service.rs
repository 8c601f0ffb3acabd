//! The service of a part: it takes the orders of a coordinator, and a thread carries them out.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma_commands::Failure;

use super::job::Job;
use crate::control::messages::{self, Order};
use crate::control::proto;
use crate::control::proto::part_server::Part;

/// The number of orders, and of reports, that may wait.
const WAITING: usize = 8;

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
        let job = Job::new(self.address, orders, reports.clone());
        let stop = job.stop();
        // The thread sees the end of the orders, also where it waits for other parts.
        tokio::spawn(async move {
            if let Err(failure) = pass(request.into_inner(), &sender).await {
                let _ = reports.send(Err(Status::invalid_argument(failure.with_causes()))).await;
            }
            stop.stop();
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
        let read = messages::read(&order.json, "the coordinator")?;
        if sender.send((read, order.content)).await.is_err() {
            break;
        }
    }
    Ok(())
}
