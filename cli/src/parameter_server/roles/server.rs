//! A server process: it holds variables and takes their gradients.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tonic::transport::Server as Tonic;
use tonic_rdma::gather;
use tonic_rdma_commands::Failure;
use tonic_rdma_tensor::RdmaDevice;

use crate::measure::process::cores;
use crate::measure::process::runtime::Flavour;
use crate::measure::transport::listener::tcp_listener;
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ProcessOptions;
use crate::parameter_server::processes::control::{
    self, ChildCommand, Done, Ready, Report, Sent, TurnRequest,
};
use crate::parameter_server::transfer::check::Receipt;
use crate::parameter_server::transfer::grpc::ParameterService;
use crate::parameter_server::transfer::shard::Shard;
use crate::parameter_server::transfer::slots::{self, Receivers, Senders, SlotDirection};
use crate::parameter_server::transfer::variables::{Layout, Origin, Variables};

/// Serves until stdin ends. The end of the parent closes stdin in every case.
pub(crate) fn run(options: &ProcessOptions) -> Result<(), Failure> {
    let pinned = options.core.is_some_and(|core| cores::pin(core).is_ok());
    let commands = control::receive_commands()?;
    let runtime = Flavour::IdlePolling.build();
    let runtime = runtime.map_err(|error| Failure::run("can't start a runtime").because(error))?;
    control::report_failure(runtime.block_on(async {
        let (mut server, ready) = Server::start(options).await?;
        control::send_report(&Report::Ready(Ready { pinned, ..ready }))?;
        server.run_commands(commands).await
    }))
}

/// The slots of a worker.
#[derive(Debug)]
struct Peer {
    number: u32,
    receivers: Receivers,
    /// Known once the worker has slots to attach to.
    senders: Option<Senders>,
}

/// The result of a worker's part of a turn.
type Served = Result<(Peer, Receipt), Failure>;

struct Server {
    variables: Arc<Variables>,
    service: ParameterService,
    device: Option<RdmaDevice>,
    peers: Vec<Peer>,
    /// The parts of a running turn by slots.
    turn: JoinSet<Served>,
    reduces: bool,
}

impl Server {
    async fn start(options: &ProcessOptions) -> Result<(Self, Ready), Failure> {
        let shard = Shard::new(options.server, options.servers);
        let variables = Arc::new(Variables::new(options.model, Origin::Server, shard)?);
        let gradients =
            (0..options.workers).map(|worker| Layout::new(options.model, Origin::Worker(worker), shard));
        let gradients: Arc<[Layout]> = gradients.collect::<Result<_, _>>()?;
        let service =
            ParameterService::new(Arc::clone(&variables), Arc::clone(&gradients), options.reduces());
        let mut ready = Ready { sent: vec![Sent::new(variables.reduced())], ..Ready::default() };
        listen(options, &service, &mut ready).await?;

        let (mut device, mut peers) = (None, Vec::new());
        if options.uses_slots() {
            let made = slots::device(options).await?;
            for (number, layout) in (0..).zip(gradients.iter()) {
                let receivers = Receivers::new(&made, SlotDirection::Push, number, vec![layout.clone()])?;
                peers.push(Peer { number, receivers, senders: None });
            }
            ready.device = Some(made.endpoint());
            device = Some(made);
        }
        let (turn, reduces) = (JoinSet::new(), options.reduces());
        Ok((Self { variables, service, device, peers, turn, reduces }, ready))
    }

    async fn run_commands(&mut self, mut commands: UnboundedReceiver<ChildCommand>) -> Result<(), Failure> {
        while let Some(command) = commands.recv().await {
            match command {
                ChildCommand::Attach { workers } => {
                    self.attach(&workers).await?;
                    control::send_report(&Report::Attached)?;
                }
                ChildCommand::Turn(turn) => {
                    let cpu = cores::cpu_time();
                    self.begin(turn);
                    self.watch(&mut commands).await?;
                    let done = self.collect().await?;
                    let cpu_nanos = cores::cpu_time().saturating_sub(cpu).as_nanos() as u64;
                    control::send_report(&Report::Done(Done { cpu_nanos, ..done }))?;
                }
                ChildCommand::Collect => {
                    return Err(Failure::run("got the command to collect without a turn"));
                }
            }
        }
        Ok(())
    }

    /// Attaches to the slots of all workers.
    async fn attach(&mut self, workers: &[String]) -> Result<(), Failure> {
        let Some(device) = &self.device else { return Ok(()) };
        for (peer, endpoint) in self.peers.iter_mut().zip(workers) {
            let channel = slots::channel(device, endpoint).await?;
            let layout = self.variables.layout();
            let (number, layouts) = (peer.number, [layout]);
            let senders = Senders::attach(vec![channel], SlotDirection::Pull, number, &layouts).await?;
            peer.senders = Some(senders);
        }
        Ok(())
    }

    /// Begins a turn. Calls need no begin.
    fn begin(&mut self, turn: TurnRequest) {
        if turn.mode.uses_slots() {
            for peer in self.peers.drain(..) {
                self.turn.spawn(serve(peer, turn, Arc::clone(&self.variables), self.reduces));
            }
        }
    }

    /// Waits until the workers have ended the turn. If a part of the turn fails earlier, this failure ends the wait.
    async fn watch(&mut self, commands: &mut UnboundedReceiver<ChildCommand>) -> Result<(), Failure> {
        loop {
            tokio::select! {
                Some(served) = self.turn.join_next() => self.served(served)?,
                command = commands.recv() => return match command {
                    Some(ChildCommand::Collect) | None => Ok(()),
                    Some(other) => Err(Failure::run(format!("got the command {other:?} in the middle of a turn"))),
                },
            }
        }
    }

    /// Returns the result of the turn.
    async fn collect(&mut self) -> Result<Done, Failure> {
        while let Some(served) = self.turn.join_next().await {
            self.served(served)?;
        }
        Ok(self.service.receipt().done())
    }

    /// Notes that a worker's part of the turn has ended.
    fn served(&mut self, served: Result<Served, tokio::task::JoinError>) -> Result<(), Failure> {
        let (peer, receipt) = served.map_err(|error| Failure::run("the turn crashed").because(error))??;
        self.service.add(&receipt);
        self.peers.push(peer);
        Ok(())
    }
}

/// Listens for calls, over TCP and RDMA as the modes need it.
async fn listen(
    options: &ProcessOptions,
    service: &ParameterService,
    ready: &mut Ready,
) -> Result<(), Failure> {
    let tonic = || options.http2.server(Tonic::builder()).add_service(service.clone().server());
    let failed = |error: std::io::Error| Failure::run("can't listen").because(error);
    if options.modes.0.contains(&TransferMode::GrpcTcp) {
        let incoming = tcp_listener()?;
        ready.tcp = Some(incoming.local_addr().map_err(failed)?);
        tokio::spawn(tonic().serve_with_incoming(incoming));
    }
    if options.modes.0.contains(&TransferMode::GrpcRdma) {
        let (incoming, address) = options.rdma()?.bind().await?;
        ready.rdma = Some(address);
        tokio::spawn(tonic().serve_with_incoming(incoming));
    }
    if options.modes.0.contains(&TransferMode::GrpcRdmaGather) {
        let (incoming, address) = options.rdma()?.bind().await?;
        ready.rdma_gather = Some(address);
        let server = options.http2.server(Tonic::builder()).layer(gather::responses());
        let mut server = server;
        tokio::spawn(server.add_service(service.clone().server()).serve_with_incoming(incoming));
    }
    if options.modes.0.contains(&TransferMode::GrpcNative) {
        let rdma = options.rdma()?;
        let (incoming, address) = rdma.bind().await?;
        ready.native = Some(address);
        let server = rdma.server(options.http2).add_service(service.clone().server());
        tokio::spawn(server.serve_with_incoming(incoming));
    }
    if options.modes.0.contains(&TransferMode::GrpcNativeGather) {
        let rdma = options.rdma()?;
        let (incoming, address) = rdma.bind().await?;
        ready.native_gather = Some(address);
        let server = rdma.server(options.http2).add_service(service.clone().server());
        let both = gather::both_layer().max_decoding_message_size(usize::MAX);
        tokio::spawn(server.layer(both).serve_with_incoming(incoming));
    }
    Ok(())
}

/// Serves one worker's part of a turn by slots: its variables are sent as soon as its last gradients have arrived.
async fn serve(mut peer: Peer, turn: TurnRequest, variables: Arc<Variables>, reduces: bool) -> Served {
    let mut receipt = Receipt::of(&turn, reduces);
    let number = peer.number;
    let variables = [variables];
    let named = |error: Failure| Failure::run(format!("worker {number}")).because(error);
    for step in turn.numbers() {
        let Some(senders) = &mut peer.senders else {
            return Err(named(Failure::run("its slots are not known")));
        };
        senders.send(turn.mode, &variables, step).await.map_err(named)?;
        peer.receivers.receive(step, &mut receipt).await.map_err(named)?;
    }
    Ok((peer, receipt))
}
