//! The server half of the modes that place tensors. Each mode has a task, which looks for tensors during the mode's
//! turns and sleeps otherwise.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};
use tonic_rdma_proto::placement::placement_server::{Placement, PlacementServer};
use tonic_rdma_proto::placement::prepare_request::Load as Wanted;
use tonic_rdma_proto::placement::{
    BeginReply, BeginRequest, EndReply, EndRequest, PrepareReply, PrepareRequest, ReleaseReply,
    ReleaseRequest,
};
use tonic_rdma_tensor::{ChannelError, RdmaDevice};

use super::receiver::{ReceiverCommand, receive};
use super::sink::{Sink, SinkSettings};
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::mode::Mode;
use crate::compare::plan::cell::Load;
use crate::measure::consume::Consume;
use crate::workload::Workload;

/// The receivers of all modes that place tensors. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct PlacementService {
    device: RdmaDevice,
    consume: Consume,
    receivers: Arc<Mutex<HashMap<&'static str, Receiver>>>,
}

/// The task of a mode.
#[derive(Debug)]
struct Receiver {
    commands: mpsc::Sender<ReceiverCommand>,
    task: JoinHandle<()>,
}

impl PlacementService {
    /// Makes a service whose tensors arrive at `device`.
    pub(crate) fn new(device: RdmaDevice, consume: Consume) -> Self {
        Self { device, consume, receivers: Arc::default() }
    }

    /// Returns the service as a tonic server.
    pub(crate) fn server(self) -> PlacementServer<Self> {
        PlacementServer::new(self)
    }

    /// Ends the mode's receiver, so that its names are free.
    async fn give_up(receivers: &mut HashMap<&'static str, Receiver>, mode: Mode) {
        if let Some(Receiver { commands, task }) = receivers.remove(mode.name()) {
            drop(commands);
            // The task's result does not matter, only its end.
            let _ = task.await;
        }
    }

    async fn command<T>(
        &self,
        mode: &str,
        command: impl FnOnce(oneshot::Sender<T>) -> ReceiverCommand,
    ) -> Result<T, Status> {
        let commands = {
            let receivers = self.receivers.lock().await;
            receivers.get(mode).map(|receiver| receiver.commands.clone())
        };
        let commands = commands
            .ok_or_else(|| Status::failed_precondition(format!("nothing is prepared for {mode:?}")))?;
        let (answer, answered) = oneshot::channel();
        let gone = || Status::aborted(format!("the receiver of {mode} is gone or in another turn"));
        commands.send(command(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }
}

#[tonic::async_trait]
impl Placement for PlacementService {
    async fn prepare(&self, request: Request<PrepareRequest>) -> Result<Response<PrepareReply>, Status> {
        let PrepareRequest { mode, load, seed, depth } = request.into_inner();
        let mode = placing(&mode)?;
        let load = wanted(load)?;
        let mut receivers = self.receivers.lock().await;
        Self::give_up(&mut receivers, mode).await;
        let settings = SinkSettings { mode, load, seed, depth, reduces: mode.reduces(self.consume) };
        let sink = Sink::new(&self.device, &settings).map_err(|error| refusal(&error))?;
        let (commands, taken) = mpsc::channel(1);
        let task = tokio::spawn(receive(sink, mode.awaits(), taken));
        receivers.insert(mode.name(), Receiver { commands, task });
        Ok(Response::new(PrepareReply {}))
    }

    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        let BeginRequest { mode, every_byte } = request.into_inner();
        self.command(&mode, |begun| ReceiverCommand::Begin { every_byte, begun }).await?;
        Ok(Response::new(BeginReply {}))
    }

    async fn end(&self, request: Request<EndRequest>) -> Result<Response<EndReply>, Status> {
        let mode = request.into_inner().mode;
        let record = self.command(&mode, |ended| ReceiverCommand::End { ended }).await?;
        record.map(|record| Response::new(record.into())).map_err(|error| refusal(&error.into()))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseReply>, Status> {
        let mode = placing(&request.into_inner().mode)?;
        Self::give_up(&mut *self.receivers.lock().await, mode).await;
        Ok(Response::new(ReleaseReply {}))
    }
}

/// Returns the mode of this name, if it places tensors.
fn placing(name: &str) -> Result<Mode, Status> {
    let mode = Mode::from_name(name).filter(|mode| mode.carries_tensors());
    mode.ok_or_else(|| Status::invalid_argument(format!("{name:?} is no mode that places tensors")))
}

fn wanted(load: Option<Wanted>) -> Result<Load, Status> {
    match load {
        Some(Wanted::Bytes(bytes @ 1..)) => Ok(Load::Size(bytes)),
        Some(Wanted::Workload(name)) => Workload::from_name(&name)
            .map(Load::Workload)
            .ok_or_else(|| Status::invalid_argument(format!("unknown workload {name:?}"))),
        Some(Wanted::Bytes(0)) | None => Err(Status::invalid_argument("nothing is to be placed")),
    }
}

fn refusal(error: &CallError) -> Status {
    match error {
        CallError::Channel(ChannelError::Memory(_)) => Status::resource_exhausted(error.to_string()),
        _ => Status::internal(error.to_string()),
    }
}
