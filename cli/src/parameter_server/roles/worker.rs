//! A worker process: it pulls the variables, computes if asked, and pushes gradients, mini-batch after mini-batch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedReceiver;
use tonic_rdma_commands::Failure;
use tonic_rdma_tensor::RdmaDevice;

use crate::measure::process::cores;
use crate::measure::process::runtime::Flavour;
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ProcessOptions;
use crate::parameter_server::processes::control::{
    self, ChildCommand, Done, Ready, Report, Sent, TurnRequest,
};
use crate::parameter_server::transfer::check::Receipt;
use crate::parameter_server::transfer::grpc::{ParameterClient, lock};
use crate::parameter_server::transfer::shard::Shard;
use crate::parameter_server::transfer::slots::{self, Receivers, Senders, SlotDirection};
use crate::parameter_server::transfer::variables::{Layout, Origin, Variables};

/// Works until stdin ends. The end of the parent closes stdin in every case.
pub(crate) fn run(options: &ProcessOptions) -> Result<(), Failure> {
    let pinned = options.core.is_some_and(|core| cores::pin(core).is_ok());
    let commands = control::receive_commands()?;
    let runtime = Flavour::IdlePolling.build();
    let runtime = runtime.map_err(|error| Failure::run("can't start a runtime").because(error))?;
    control::report_failure(runtime.block_on(async {
        let (mut worker, ready) = Worker::start(options).await?;
        control::send_report(&Report::Ready(Ready { pinned, ..ready }))?;
        worker.run_commands(commands).await
    }))
}

struct Worker {
    /// The gradients for each server.
    gradients: Vec<Arc<Variables>>,
    /// The expected variables of each server.
    variables: Vec<Layout>,
    callers: HashMap<TransferMode, ParameterClient>,
    slots: Option<Slots>,
    reduces: bool,
}

struct Slots {
    receivers: Receivers,
    senders: Senders,
    _device: RdmaDevice,
}

impl Worker {
    async fn start(options: &ProcessOptions) -> Result<(Self, Ready), Failure> {
        let (mut gradients, mut variables, mut ready) = (Vec::new(), Vec::new(), Ready::default());
        for shard in Shard::all(options.servers) {
            let of = Variables::new(options.model, Origin::Worker(options.worker), shard)?;
            ready.sent.push(Sent::new(of.reduced()));
            gradients.push(Arc::new(of));
            variables.push(Layout::new(options.model, Origin::Server, shard)?);
        }
        let mut callers = HashMap::new();
        for mode in options.modes.0.iter().filter(|mode| !mode.uses_slots()) {
            let (caller, provider) = ParameterClient::connect(*mode, options).await?;
            ready.provider = ready.provider.or(provider);
            callers.insert(*mode, caller);
        }
        let mut slots = None;
        if options.uses_slots() {
            let device = slots::device(options).await?;
            let receivers = Receivers::new(&device, SlotDirection::Pull, options.worker, variables.clone())?;
            let mut channels = Vec::new();
            for server in &options.device {
                let channel = slots::channel(&device, server).await?;
                ready.provider = Some(channel.device().0.to_owned());
                channels.push(channel);
            }
            ready.device = Some(device.endpoint());
            let layouts: Vec<&Layout> = gradients.iter().map(|of| of.layout()).collect();
            let senders = Senders::attach(channels, SlotDirection::Push, options.worker, &layouts).await?;
            slots = Some(Slots { receivers, senders, _device: device });
        }
        let reduces = options.reduces();
        Ok((Self { gradients, variables, callers, slots, reduces }, ready))
    }

    async fn run_commands(&mut self, mut commands: UnboundedReceiver<ChildCommand>) -> Result<(), Failure> {
        while let Some(command) = commands.recv().await {
            let ChildCommand::Turn(turn) = command else {
                return Err(Failure::run(format!("a worker can't {command:?}")));
            };
            let cpu = cores::cpu_time();
            let done = self.turn(turn).await?;
            let cpu_nanos = cores::cpu_time().saturating_sub(cpu).as_nanos() as u64;
            control::send_report(&Report::Done(Done { cpu_nanos, ..done }))?;
        }
        Ok(())
    }

    async fn turn(&mut self, turn: TurnRequest) -> Result<Done, Failure> {
        if turn.mode.uses_slots() { self.turn_by_slots(turn).await } else { self.turn_by_calls(turn).await }
    }

    /// Makes a turn by slots. The server writes the variables without a request, as soon as it has the last gradients.
    async fn turn_by_slots(&mut self, turn: TurnRequest) -> Result<Done, Failure> {
        let missing = || Failure::run(format!("no slots for {}", turn.mode));
        let Slots { receivers, senders, .. } = self.slots.as_mut().ok_or_else(missing)?;
        let mut receipt = Receipt::of(&turn, self.reduces);
        let mut nanos = Vec::with_capacity(turn.steps as usize);
        for step in turn.numbers() {
            let start = Instant::now();
            receivers.receive(step, &mut receipt).await?;
            turn.computing.run().await?;
            senders.send(turn.mode, &self.gradients, step).await?;
            senders.flush().await?;
            nanos.push(start.elapsed().as_nanos() as u64);
        }
        Ok(Done { nanos, ..receipt.done() })
    }

    async fn turn_by_calls(&mut self, turn: TurnRequest) -> Result<Done, Failure> {
        let missing = || Failure::run(format!("no connection for {}", turn.mode));
        let caller = self.callers.get(&turn.mode).ok_or_else(missing)?;
        let receipt = Arc::new(Mutex::new(Receipt::of(&turn, self.reduces)));
        let mut nanos = Vec::with_capacity(turn.steps as usize);
        for step in turn.numbers() {
            let start = Instant::now();
            caller.pull(&self.variables, step, &receipt).await?;
            turn.computing.run().await?;
            caller.push(&self.gradients, step, turn.every_byte).await?;
            nanos.push(start.elapsed().as_nanos() as u64);
        }
        caller.check_native()?;
        let done = lock(&receipt).done();
        Ok(Done { nanos, ..done })
    }
}
