//! The services that take payloads and check them, or answer with payloads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::task::AbortHandle;
use tonic::{Request, Response, Status};
use tonic_rdma_commands::cores::Usage;
use tonic_rdma_commands::payload::content::{Content, VARIANTS, check_buffers, variant_seed};
use tonic_rdma_commands::payload::reduce::{Reduced, reduce_all};
use tonic_rdma_commands::payload::seeded::SplitMix64;
use tonic_rdma_proto::reference::reference_server::ReferenceServer;
use tonic_rdma_proto::tensors::exchange_server::{Exchange, ExchangeServer};
use tonic_rdma_proto::tensors::{
    BeginTrialReply, BeginTrialRequest, EndTrialReply, EndTrialRequest, GetReply, GetRequest, Mismatch,
    PushReply, PushRequest,
};
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{Check, PutReply, PutRequest, UsageReply, UsageRequest};

use tonic_rdma_tensor::buffer::BufferClientBuilder;
use tonic_rdma_verbs::unstable::lock;

use crate::compare::modes::grpc::reference::Fetches;
use crate::compare::operations::registered;

/// Takes payloads, and answers whether their content is right.
#[derive(Clone, Debug, Default)]
pub(crate) struct TransferService {
    checker: Checker,
    /// Whether each answer has the result of consuming the payload.
    reduces: bool,
    /// Keeps the runtime awake in trials that ask for it.
    awake: KeepAwake,
    /// The payloads of answers.
    source: Source,
    /// The longest message, without which there is no limit.
    longest: Option<usize>,
    /// Fetches payloads that come by reference, on the listeners of these modes.
    pub(crate) fetches: Option<Fetches>,
}

impl TransferService {
    /// Makes a service, which consumes payloads if `reduces`.
    pub(crate) fn reducing(reduces: bool) -> Self {
        Self { reduces, ..Self::default() }
    }

    /// Returns the service with a limit on messages: `payload` bytes, and what is beside the payload.
    pub(crate) fn up_to(self, payload: u64) -> Self {
        const BESIDE: u64 = 1 << 20;
        Self { longest: usize::try_from(payload.saturating_add(BESIDE)).ok(), ..self }
    }

    /// Returns the service with payloads from `source` in its answers.
    pub(crate) fn with(self, source: Source) -> Self {
        Self { source, ..self }
    }

    /// Returns the service with a client of `settings`, which fetches payloads that come by reference. A device
    /// must read the bytes if `native`.
    pub(crate) fn fetching(self, settings: BufferClientBuilder, native: bool) -> Self {
        Self { fetches: Some(Fetches::new(settings, native, self.longest)), ..self }
    }

    /// Returns the service for single payloads as a tonic server.
    pub(crate) fn transfer(&self) -> TransferServer<Self> {
        TransferServer::new(self.clone())
            .max_decoding_message_size(self.longest.unwrap_or(usize::MAX))
            .max_encoding_message_size(usize::MAX)
    }

    /// Returns the service for payloads by reference, on a listener for them.
    pub(crate) fn reference(&self) -> Option<ReferenceServer<Self>> {
        self.fetches.as_ref().map(|_| ReferenceServer::new(self.clone()))
    }

    /// Returns the service for all else as a tonic server.
    pub(crate) fn exchange(&self) -> ExchangeServer<Self> {
        ExchangeServer::new(self.clone())
            .max_decoding_message_size(self.longest.unwrap_or(usize::MAX))
            .max_encoding_message_size(usize::MAX)
    }
}

#[tonic::async_trait]
impl Transfer for TransferService {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let (every_byte, payload) = (request.check() == Check::All, std::slice::from_ref(&request.payload));
        let Findings { mismatch, reduced } =
            self.checker.check(request.seed, payload, every_byte, self.reduces);
        Ok(Response::new(PutReply {
            bytes: request.payload.len() as u64,
            first_mismatch: mismatch.map_or(0, |wrong| wrong.offset + 1),
            maximum: reduced.map(|reduced| reduced.maximum),
            digest: reduced.map(|reduced| reduced.digest),
        }))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        let Usage { cpu, switches, sleeps } = Usage::of_this_process();
        let cpu_nanos = u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
        Ok(Response::new(UsageReply { cpu_nanos, switches, sleeps }))
    }
}

#[tonic::async_trait]
impl Exchange for TransferService {
    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushReply>, Status> {
        let PushRequest { seed, every_byte, buffers } = request.into_inner();
        let Findings { mismatch, reduced } = self.checker.check(seed, &buffers, every_byte, self.reduces);
        Ok(Response::new(PushReply {
            lengths: buffers.iter().map(|buffer| buffer.len() as u64).collect(),
            mismatch,
            maximum: reduced.map(|reduced| reduced.maximum),
            digest: reduced.map(|reduced| reduced.digest),
        }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let GetRequest { origin, seed, bytes } = request.into_inner();
        if self.longest.is_some_and(|longest| bytes > longest as u64) {
            return Err(Status::resource_exhausted(format!("{bytes} bytes are more than this run has")));
        }
        Ok(Response::new(GetReply { payload: self.source.payload(origin, seed, bytes)? }))
    }

    async fn begin(&self, request: Request<BeginTrialRequest>) -> Result<Response<BeginTrialReply>, Status> {
        if request.into_inner().never_sleep {
            self.awake.begin();
        }
        Ok(Response::new(BeginTrialReply {}))
    }

    async fn end(&self, _: Request<EndTrialRequest>) -> Result<Response<EndTrialReply>, Status> {
        self.awake.end();
        self.fetches.as_ref().map_or(Ok(()), Fetches::check_native)?;
        Ok(Response::new(self.checker.end()))
    }
}

/// Keeps content, and cuts each answer from it. Clones share the content.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    made: Arc<Mutex<Option<Content>>>,
    /// Whether the content lies in registered memory.
    registers: bool,
}

impl Source {
    /// Makes a source whose payloads are sent from registered memory.
    pub(crate) fn registering() -> Self {
        Self { registers: true, ..Self::default() }
    }

    /// Makes a source of buffers of `content`.
    pub(crate) fn over(content: Content) -> Self {
        Self { made: Arc::new(Mutex::new(Some(content))), ..Self::default() }
    }

    /// Returns the payload of `seed`, a part of the content of `origin`. The first call for a content makes
    /// it for this payload in all its variants. Further calls cost a reference count.
    fn payload(&self, origin: u64, seed: u64, bytes: u64) -> Result<Bytes, Status> {
        let no_memory = || Status::resource_exhausted(format!("there is no memory for {bytes} bytes"));
        let bytes = usize::try_from(bytes).map_err(|_| no_memory())?;
        let mut made = lock(&self.made);
        let kept = made.as_ref().filter(|content| content.seed() == origin);
        if let Some(buffer) = kept.and_then(|content| content.buffer(seed, bytes)) {
            return Ok(buffer);
        }
        if !(0..VARIANTS).any(|variant| variant_seed(origin, variant) == seed) {
            return Err(Status::invalid_argument("the seed is of another content"));
        }
        // The memory of the last content is freed first.
        *made = None;
        let content = if self.registers {
            let room = usize::try_from(Content::with_variants(bytes as u64)).map_err(|_| no_memory())?;
            registered(room, origin).map_err(|_| no_memory())?
        } else {
            Content::new(bytes, origin).map_err(|_| no_memory())?
        };
        made.insert(content).buffer(seed, bytes).ok_or_else(no_memory)
    }
}

/// Checks the messages that arrive at a receiver. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Checker {
    /// Number of messages so far. The check derives the sampled offsets from it, so that they differ from message
    /// to message.
    messages: Arc<AtomicU64>,
    /// A sample of the messages of this trial, if nothing else checks every byte of them.
    sample: Sample,
}

/// What a receiver has found in a message: the first wrong byte, and the result of consuming the message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Findings {
    pub(crate) mismatch: Option<Mismatch>,
    pub(crate) reduced: Option<Reduced>,
}

impl Checker {
    /// Checks `buffers` with the content of `seed`, and consumes them if this `reduces`.
    pub(crate) fn check(&self, seed: u64, buffers: &[Bytes], every_byte: bool, reduces: bool) -> Findings {
        let draw = self.messages.fetch_add(1, Ordering::Relaxed);
        let mismatch = check_buffers(seed, buffers, (!every_byte).then_some(draw));
        if !every_byte && !reduces {
            self.sample.arrived(seed, buffers);
        }
        Findings {
            mismatch: mismatch.map(|(buffer, offset)| Mismatch { buffer, offset }),
            reduced: reduces.then(|| reduce_all(buffers.iter().map(|buffer| &buffer[..]))),
        }
    }

    /// Checks every byte of the sampled messages of a trial, which ends.
    pub(crate) fn end(&self) -> EndTrialReply {
        self.sample.check()
    }
}

/// Number of polls after which the thread yields to other processes, for machines with more processes than
/// cores.
const POLLS: u32 = 16;

/// Keeps the runtime awake from [`begin`](Self::begin) to [`end`](Self::end). Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAwake {
    task: Arc<Mutex<Option<AbortHandle>>>,
}

impl KeepAwake {
    /// Keeps the current runtime from sleeping from now on, if it has one thread. In a multi-thread runtime
    /// the other threads still sleep.
    pub(crate) fn begin(&self) {
        let task = tokio::spawn(async {
            // A task that yields is polled last: tokio polls for arrivals, without waiting for any, before it
            // polls the task again.
            for poll in 1u32.. {
                tokio::task::yield_now().await;
                if poll.is_multiple_of(POLLS) {
                    std::thread::yield_now();
                }
            }
        });
        self.replace(Some(task.abort_handle()));
    }

    /// Lets the runtime sleep again.
    pub(crate) fn end(&self) {
        self.replace(None);
    }

    fn replace(&self, task: Option<AbortHandle>) {
        let mut kept = lock(&self.task);
        if let Some(other) = std::mem::replace(&mut *kept, task) {
            other.abort();
        }
    }
}

/// The largest number of kept messages, and of bytes in them. A single message may be larger.
const MESSAGES: usize = 64;
const BYTES: u64 = 1 << 20;
/// Larger messages are not kept: a trial has few of them, and the allocation of memory for the next one would
/// be much of the measured time.
const LARGEST: u64 = 256 << 20;

/// A fair sample: each message of a trial is in the sample with equal probability. Clones share it.
///
/// A kept message costs a reference count, and its memory is not free for the next message. So the sample
/// keeps no more than fits into a cache, and replaces messages more seldom the larger they are.
#[derive(Clone, Debug, Default)]
struct Sample {
    kept: Arc<Mutex<SampleState>>,
}

#[derive(Debug)]
struct SampleState {
    /// Number of messages of the trial so far.
    seen: u64,
    draws: SplitMix64,
    /// Seed and buffers of each.
    messages: Vec<(u64, Vec<Bytes>)>,
}

impl Default for SampleState {
    fn default() -> Self {
        Self { seen: 0, draws: SplitMix64::new(0x5a3b_1e01), messages: Vec::new() }
    }
}

impl Sample {
    /// Offers a message of `buffers` with the content of `seed` to the sample. The message may replace an
    /// older one.
    fn arrived(&self, seed: u64, buffers: &[Bytes]) {
        let bytes: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        if bytes > LARGEST {
            return;
        }
        let capacity = (BYTES / bytes.max(1)).clamp(1, MESSAGES as u64) as usize;
        let mut kept = lock(&self.kept);
        kept.seen += 1;
        let index = match kept.messages.len() {
            room if room < capacity => room,
            // The nth message stays with probability capacity / n.
            _ => (kept.draws.bits() % kept.seen) as usize,
        };
        if index < capacity {
            let message = (seed, buffers.to_vec());
            match kept.messages.get_mut(index) {
                Some(other) => *other = message,
                None => kept.messages.push(message),
            }
        }
    }

    /// Checks every byte of the kept messages, and drops them.
    fn check(&self) -> EndTrialReply {
        let messages = {
            let mut kept = lock(&self.kept);
            kept.seen = 0;
            std::mem::take(&mut kept.messages)
        };
        let wrong = messages.iter().find_map(|(seed, buffers)| check_buffers(*seed, buffers, None));
        let wrong = wrong.map(|(buffer, offset)| Mismatch { buffer, offset });
        EndTrialReply { messages: messages.len() as u64, wrong }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use tonic::Code;
    use tonic::transport::Server;
    use tonic_rdma_commands::payload::content::check_all;

    use super::*;
    use crate::compare::modes::call_error::CallError;
    use crate::compare::modes::grpc::client::{self, CallSettings, GrpcCaller};
    use crate::compare::modes::mode::Mode;
    use crate::compare::operations::Operations;
    use crate::compare::plan::Direction;
    use crate::measure::settings::Http2;
    use crate::measure::transport::{LOCALHOST, tcp_listener};
    use crate::workload::Workload;

    /// A service whose answers have a wrong byte, or are too short.
    #[derive(Clone, Copy, Debug)]
    enum FaultySource {
        Wrong(usize),
        Short,
    }

    #[tonic::async_trait]
    impl Exchange for FaultySource {
        async fn push(&self, _: Request<PushRequest>) -> Result<Response<PushReply>, Status> {
            Err(Status::unimplemented("not needed here"))
        }

        async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
            let GetRequest { origin, seed, bytes } = request.into_inner();
            let mut payload = Source::default().payload(origin, seed, bytes)?.to_vec();
            match *self {
                Self::Wrong(at) => payload[at] ^= 4,
                Self::Short => payload.truncate(payload.len() - 8),
            }
            Ok(Response::new(GetReply { payload: payload.into() }))
        }

        async fn begin(&self, _: Request<BeginTrialRequest>) -> Result<Response<BeginTrialReply>, Status> {
            Ok(Response::new(BeginTrialReply {}))
        }

        async fn end(&self, _: Request<EndTrialRequest>) -> Result<Response<EndTrialReply>, Status> {
            Ok(Response::new(EndTrialReply::default()))
        }
    }

    async fn caller(exchange: ExchangeServer<impl Exchange>, operations: &Operations) -> GrpcCaller {
        let incoming = tcp_listener(LOCALHOST).unwrap();
        let address = incoming.local_addr().unwrap();
        tokio::spawn(Server::builder().add_service(exchange).serve_with_incoming(incoming));
        let channel = client::tcp(address, Http2::DEFAULT).await.unwrap();
        let settings = CallSettings { direction: Direction::Down, reduces: true, ..CallSettings::default() };
        let mut caller = GrpcCaller::new(channel, Mode::GrpcTcp, settings);
        caller.prepare(operations).unwrap();
        caller
    }

    #[tokio::test]
    async fn the_client_finds_wrong_payloads() {
        let operations = Operations::new(Workload::Size(100_000), 3, true).unwrap();
        let mut right = caller(TransferService::default().exchange(), &operations).await;
        for trial in 0..6 {
            for check in [Check::All, Check::Stamps] {
                right.run(&operations.take(trial), check, 1).await.unwrap();
            }
        }
        let other = operations.take(0).changed(|put| put.reduced = None);
        let error = right.run(&other, Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { sent: None, .. }), "{error}");

        let mut wrong = caller(ExchangeServer::new(FaultySource::Wrong(70_001)), &operations).await;
        let error = wrong.run(&operations.take(1), Check::All, 1).await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 70_001 }), "{error}");
        let mut wrong = caller(ExchangeServer::new(FaultySource::Wrong(99_999)), &operations).await;
        let error = wrong.run(&operations.take(1), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 99_999 }), "{error}");
        let mut short = caller(ExchangeServer::new(FaultySource::Short), &operations).await;
        let error = short.run(&operations.take(1), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(&error, CallError::Buffers { arrived, .. } if arrived == &[99_992]), "{error}");
        assert!(error.is_mismatch());
    }

    #[tokio::test]
    async fn torn_payloads_are_found_at_the_end_of_the_trial() {
        let operations = Operations::new(Workload::Size(1 << 20), 3, true).unwrap();
        let mut wrong = caller(ExchangeServer::new(FaultySource::Wrong(500_000)), &operations).await;
        wrong.settings.reduces = false;
        for trial in 0..4 {
            wrong.run(&operations.take(trial), Check::Stamps, 1).await.unwrap();
        }
        let error = wrong.end().await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { offset: 500_000, .. }), "{error}");
        // A client that consumes finds the wrong byte in each call.
        wrong.settings.reduces = true;
        let error = wrong.run(&operations.take(0), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { .. }), "{error}");
    }

    #[test]
    fn every_variant_of_every_content_matches_its_seed() {
        for source in [Source::default(), Source::registering()] {
            for (origin, bytes) in [(7, 100_001), (7, 64), (u64::MAX - 9, 1)] {
                for variant in 0..VARIANTS {
                    let seed = variant_seed(origin, variant);
                    let payload = source.payload(origin, seed, bytes).unwrap();
                    assert_eq!((payload.len() as u64, check_all(seed, &payload)), (bytes, None));
                }
            }
        }
    }

    #[test]
    fn unknown_seeds_and_too_large_payloads_are_refused() {
        let source = Source::default();
        assert_eq!(source.payload(7, 8, 64).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(source.payload(7, 7, 1 << 62).unwrap_err().code(), Code::ResourceExhausted);
        source.payload(7, 7, 64).unwrap();
    }
}

#[cfg(test)]
mod keep_awake_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Returns how often a current-thread runtime went to sleep while bytes went to and fro between it and a
    /// thread.
    fn sleeps(awake: bool) -> usize {
        let sleeps = Arc::new(AtomicUsize::new(0));
        let (parks, round_trips) = (Arc::clone(&sleeps), 50);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().on_thread_park(move || {
            parks.fetch_add(1, Ordering::Relaxed);
        });
        let runtime = runtime.build().unwrap();
        runtime.block_on(async {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let echo = std::thread::spawn(move || {
                use std::io::{Read, Write};
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.set_nodelay(true).unwrap();
                let mut byte = [0];
                while stream.read(&mut byte).unwrap() == 1 {
                    // On a busy machine an immediate answer may arrive before the runtime polls for it.
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    stream.write_all(&byte).unwrap();
                }
            });
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let keep = KeepAwake::default();
            if awake {
                keep.begin();
            }
            // Lets the task begin.
            tokio::task::yield_now().await;
            sleeps.store(0, Ordering::Relaxed);
            for byte in (0..round_trips).map(|number| number as u8) {
                stream.write_all(&[byte]).await.unwrap();
                assert_eq!(stream.read_u8().await.unwrap(), byte);
            }
            let slept = sleeps.load(Ordering::Relaxed);
            keep.end();
            drop(stream);
            echo.join().unwrap();
            slept
        })
    }

    #[test]
    fn a_runtime_sleeps_between_answers_unless_it_is_kept_awake() {
        assert_eq!(sleeps(true), 0);
        assert!(sleeps(false) > 0);
    }

    #[tokio::test]
    async fn two_begins_and_an_end_leave_no_task() {
        let awake = KeepAwake::default();
        awake.begin();
        awake.begin();
        awake.end();
        awake.end();
        let metrics = tokio::runtime::Handle::current().metrics();
        while metrics.num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod sample_tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use tonic_rdma_commands::payload::content::Content;

    #[test]
    fn every_message_of_a_trial_is_kept_with_the_same_probability() {
        let sample = Sample::default();
        let payload = Bytes::from(vec![0; BYTES as usize]);
        let mut kept = [0u32; 10];
        for _ in 0..5000 {
            for number in 0..10 {
                sample.arrived(number, std::slice::from_ref(&payload));
            }
            let mut inner = lock(&sample.kept);
            assert_eq!(inner.messages.len(), 1);
            kept[inner.messages[0].0 as usize] += 1;
            inner.messages.clear();
            inner.seen = 0;
        }
        assert!(kept.iter().all(|count| (400..600).contains(count)), "{kept:?}");
    }

    #[test]
    fn many_small_messages_are_kept_and_every_byte_of_them_is_checked() {
        let sample = Sample::default();
        assert_eq!(sample.check(), EndTrialReply::default());
        let right = Content::new(10_000, 7).unwrap().cut(10_000);
        for _ in 0..1000 {
            sample.arrived(7, std::slice::from_ref(&right));
        }
        assert_eq!(sample.check(), EndTrialReply { messages: 64, wrong: None });
        let mut wrong = right.to_vec();
        wrong[5001] ^= 1;
        sample.arrived(7, &[wrong.into()]);
        assert_eq!(
            sample.check(),
            EndTrialReply { messages: 1, wrong: Some(Mismatch { buffer: 0, offset: 5001 }) }
        );
        assert_eq!(sample.check(), EndTrialReply::default());
    }

    #[test]
    fn the_largest_messages_are_not_kept() {
        let sample = Sample::default();
        let chunk = Content::new(1 << 20, 7).unwrap().cut(1 << 20);
        sample.arrived(7, &vec![chunk.clone(); 257]);
        assert_eq!(sample.check().messages, 0);
        sample.arrived(7, &vec![chunk; 256]);
        assert_eq!(sample.check().messages, 1);
    }
}
