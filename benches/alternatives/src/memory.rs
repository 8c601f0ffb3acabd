//! The modes without gRPC: iceoryx2 and the tensors of tonic-rdma. Both move bytes in memory that the two
//! processes share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::prelude::{Node, NodeBuilder, ipc};
use iceoryx2::service::port_factory::request_response::PortFactory;
use tonic_rdma::memory::Pool;
use tonic_rdma_commands::payload::content::{Content, VARIANTS, check_stamps_of, fill};
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_commands::process::{end_with_stdin, on_stdin, report_line};
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_tensor::{Arrived, Dtype, RdmaDevice, Shape, StaticSender, Tensor, TensorSpec};

use crate::Job;
use crate::measure::{Caller, Phase, SEED, accept, first_wrong, measure, seed_of};
use crate::mode::Mode;

/// One side of an iceoryx2 service. The seed and whether every byte is checked travel in a header; the answer
/// is the offset of the first wrong byte plus one, or 0.
struct Side {
    requests: PortFactory<ipc::Service, [u8], u64, u64, ()>,
    /// If the processes don't poll: wakes the peer, and waits to be woken.
    events: Option<(Notifier<ipc::Service>, Listener<ipc::Service>)>,
    _node: Node<ipc::Service>,
}

impl Side {
    fn new(job: &Job, service: &str, is_server: bool) -> Result<Self, Failure> {
        let failed = "iceoryx2 can't make a service";
        let node = NodeBuilder::new().create::<ipc::Service>().context(failed)?;
        let name = |part: &str| format!("{service}/{part}").as_str().try_into().context(failed);
        let requests = node.service_builder(&name("requests")?).request_response::<[u8], u64>();
        let requests =
            requests.request_user_header::<u64>().max_active_requests_per_client(job.cell.inflight);
        let requests = requests.max_loaned_requests(1).open_or_create().context(failed)?;
        let event = |part| node.service_builder(&name(part)?).event().open_or_create().context(failed);
        let events = match job.cores {
            Some(_) => None,
            None => {
                let (to, from) =
                    if is_server { ("to-client", "to-server") } else { ("to-server", "to-client") };
                let notifier = event(to)?.notifier_builder().create().context(failed)?;
                Some((notifier, event(from)?.listener_builder().create().context(failed)?))
            }
        };
        Ok(Self { requests, events, _node: node })
    }

    /// Wakes the peer, if it sleeps.
    fn wake(&self) -> Result<(), Failure> {
        let Some((notifier, _)) = &self.events else { return Ok(()) };
        notifier.notify().map(drop).context("iceoryx2 can't notify")
    }

    /// Waits for the peer, or polls on. Now and then it returns without a reason.
    fn wait(&self) -> Result<(), Failure> {
        match &self.events {
            None => std::hint::spin_loop(),
            Some((_, listener)) => {
                listener.timed_wait_one(Duration::from_millis(100)).context("iceoryx2 can't wait")?;
            }
        }
        Ok(())
    }
}

/// Serves by iceoryx2 until stdin ends. Then it ends in order, because iceoryx2 leaves files of a process that
/// does not.
pub(crate) fn serve_iceoryx2(job: &Job) -> Result<(), Failure> {
    let ended = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ended);
    on_stdin(drop, move || end.store(true, Ordering::Relaxed))?;
    let name = format!("tonic-rdma-alternatives-{}", std::process::id());
    let side = Side::new(job, &name, true)?;
    let server = side.requests.server_builder().create().context("iceoryx2 can't serve")?;
    report_line(&name)?;
    while !ended.load(Ordering::Relaxed) {
        while let Some(request) = server.receive().context("iceoryx2 can't receive")? {
            let header = *request.user_header();
            let wrong = first_wrong(header >> 1, request.payload(), header & 1 == 1);
            let answer = request.loan_uninit().context("iceoryx2 has no memory")?.write_payload(wrong);
            answer.send().context("iceoryx2 can't answer")?;
            side.wake()?;
        }
        side.wait()?;
    }
    Ok(())
}

/// Calls by iceoryx2.
pub(crate) async fn call_iceoryx2(job: &Job) -> Result<(), Failure> {
    let side = Side::new(job, &job.address, false)?;
    let content = Content::new(job.cell.bytes, SEED).context("there is no memory")?;
    let payloads = (0..VARIANTS).map(|variant| content.variant(variant).cut(job.cell.bytes)).collect();
    measure(job, Iceoryx { job, side, payloads, next: 0 }).await
}

struct Iceoryx<'a> {
    job: &'a Job,
    side: Side,
    payloads: Vec<bytes::Bytes>,
    next: usize,
}

impl Caller for Iceoryx<'_> {
    async fn run(&mut self, phase: Phase) -> Result<Vec<Duration>, Failure> {
        let cell = self.job.cell;
        let client = self.side.requests.client_builder().initial_max_slice_len(cell.bytes).create();
        let client = client.context("iceoryx2 can't call")?;
        let in_place = self.job.mode == Mode::Iceoryx2InPlace;
        let (mut took, mut pending) = (Vec::new(), VecDeque::new());
        while phase.goes_on(took.len()) || !pending.is_empty() {
            while pending.len() < cell.inflight && phase.goes_on(took.len() + pending.len()) {
                let (seed, payload) = (seed_of(self.next), &self.payloads[self.next % VARIANTS]);
                self.next += 1;
                let mut begin = Instant::now();
                let request = client.loan_slice_uninit(cell.bytes).context("iceoryx2 has no memory")?;
                let mut request = request.write_from_slice(payload);
                *request.user_header_mut() = seed << 1 | u64::from(phase.checks_all);
                if in_place {
                    begin = Instant::now();
                }
                pending.push_back((begin, request.send().context("iceoryx2 can't send")?));
                self.side.wake()?;
            }
            let Some((begin, first)) = pending.front() else { continue };
            match first.receive().context("iceoryx2 can't receive")? {
                Some(answer) => {
                    took.push(begin.elapsed());
                    accept(cell.bytes, cell.bytes as u64, *answer)?;
                    drop(answer);
                    pending.pop_front();
                }
                None => self.side.wait()?,
            }
        }
        Ok(took)
    }
}

/// The name of the slot for payloads.
const SLOT: &str = "payload";

fn spec(job: &Job) -> Result<TensorSpec, Failure> {
    let shape = Shape::new(&[job.cell.bytes as u64]).context("no shape")?;
    TensorSpec::new(Dtype::U8, shape).context("no tensor")
}

async fn device() -> Result<RdmaDevice, Failure> {
    RdmaDevice::bind("127.0.0.1:0").await.context("can't make a device for tensors")
}

/// Receives tensors until stdin ends. The content of each follows from its number.
pub(crate) async fn receive_tensors(job: &Job) -> Result<(), Failure> {
    end_with_stdin(|| ())?;
    let failed = "can't receive a tensor";
    let device = device().await?;
    let mut slot = device.static_receiver(SLOT, &spec(job)?, 1).context("can't make a slot")?;
    report_line(device.endpoint())?;
    for number in 0.. {
        let mut polls = 0;
        let wrong = loop {
            let arrived = match job.cores {
                None => Some(slot.recv().await.context(failed)?),
                Some(_) => slot.try_recv().context(failed)?,
            };
            match arrived {
                Some(arrived) => break check_tensor(number, &arrived)?,
                None => pause(&mut polls).await,
            }
        };
        accept(job.cell.bytes, job.cell.bytes as u64, wrong)?;
    }
    Ok(())
}

/// Returns the offset of the first wrong byte plus one, or 0.
fn check_tensor(number: usize, arrived: &Arrived<'_>) -> Result<u64, Failure> {
    let seed = seed_of(number);
    if number == 0 {
        let mut bytes = vec![0; arrived.len()];
        arrived.copy_to(&mut bytes).context("can't read a tensor")?;
        return Ok(first_wrong(seed, &bytes, true));
    }
    let (memory, range) = arrived.memory();
    let wrong = check_stamps_of(seed, range.len(), mix(number as u64), |start, word| {
        // A word that can't be read stays zero, which no content has.
        let _ = memory.copy_out(range.start + start, word);
    });
    Ok(wrong.map_or(0, |offset| offset + 1))
}

/// Lets the runtime work now and then while a task polls.
async fn pause(polls: &mut u32) {
    *polls += 1;
    match polls.is_multiple_of(1024) {
        true => tokio::task::yield_now().await,
        false => std::hint::spin_loop(),
    }
}

/// Sends tensors from registered memory.
pub(crate) async fn send_tensors(job: &Job) -> Result<(), Failure> {
    let failed = "can't prepare tensors";
    let device = device().await?;
    let channel = device.channel(&job.address, 0).await.context("can't connect to the receiver")?;
    let slot = channel.static_sender(SLOT, &spec(job)?).await.context(failed)?;
    let room = Content::with_variants(job.cell.bytes as u64) as usize;
    let mut memory =
        Pool::for_sending(room.next_multiple_of(2 << 20) as u64).allocate(room).context(failed)?;
    fill(SEED, &mut memory);
    let content = Content::over(memory.freeze(), SEED);
    let tensor = |variant| {
        Tensor::from_bytes(spec(job)?, content.variant(variant).cut(job.cell.bytes)).context(failed)
    };
    let tensors = (0..VARIANTS).map(tensor).collect::<Result<_, Failure>>()?;
    measure(job, Tensors { slot, tensors, polls: job.cores.is_some(), next: 0 }).await
}

struct Tensors {
    slot: StaticSender,
    tensors: Vec<Tensor>,
    polls: bool,
    next: usize,
}

impl Caller for Tensors {
    async fn run(&mut self, phase: Phase) -> Result<Vec<Duration>, Failure> {
        let (mut took, mut polls) = (Vec::new(), 0);
        while phase.goes_on(took.len()) {
            let begin = Instant::now();
            self.slot.send(&self.tensors[self.next % VARIANTS]).await.context("can't send a tensor")?;
            // The receiver releases a tensor that it has found right.
            while self.polls && self.slot.pending().context("the receiver is lost")? > 0 {
                pause(&mut polls).await;
            }
            self.slot.flush().await.context("the receiver is lost")?;
            took.push(begin.elapsed());
            self.next += 1;
        }
        Ok(took)
    }
}
