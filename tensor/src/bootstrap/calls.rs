//! The calls between members: the service of a member, the calls to the service of another one, and the watch
//! over another one.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};

use crate::bootstrap::members::{JoinError, VERSION, describe_missing};
use crate::bootstrap::proto::bootstrap_client::BootstrapClient;
use crate::bootstrap::proto::bootstrap_server::{self, BootstrapServer};
use crate::bootstrap::proto::{self, JoinReply, JoinRequest, Member, WatchRequest};
use crate::bootstrap::state::{Bootstrap, BootstrapCell, Details, Key, MemberState, WatchEnd, shortened};
use tonic_rdma_verbs::unstable::{chain, with_causes};

/// The longest time for making a connection, and for the answer to one call.
const ANSWER: Duration = Duration::from_secs(5);

/// How often a quiet connection is checked, and how long the answer may take. This finds a host that has
/// vanished.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_LIMIT: Duration = Duration::from_secs(20);

/// The pause before a member is called again: at first, and at most.
const PAUSE: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The longest answer in bytes: all members of the largest group.
const MAX_ANSWER: usize = 4 << 20;

/// The longest message of a watch in bytes. The texts in it are shortened.
const MAX_STATE_BYTES: usize = 64 << 10;

/// The states that a member reports to one that watches it.
pub type MemberStateStream = Streaming<proto::MemberState>;

/// What a member gets when it has joined another one.
#[derive(Debug)]
pub struct Joined {
    /// The key, which all calls to that member carry.
    pub key: Key,
    /// All members, if the caller waited for them.
    pub members: Vec<Member>,
}

/// Describes the server of a member.
pub fn server() -> Server {
    let server = Server::builder().http2_keepalive_interval(Some(PING_INTERVAL));
    server.http2_keepalive_timeout(Some(PING_LIMIT))
}

/// Describes a connection to `address` for calls to a member.
///
/// # Errors
/// The address is no `host:port`.
pub fn endpoint(scheme: &str, address: &str) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
    let endpoint = endpoint.map_err(|error| format!("{address:?} is no host:port: {}", chain(&error)))?;
    Ok(endpoint
        .connect_timeout(ANSWER)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_LIMIT)
        .keep_alive_while_idle(true))
}

impl<D: Details> Bootstrap<D> {
    /// Joins another member. Tries again until it answers or the time is over. With `wait` it answers when
    /// all have joined it.
    ///
    /// # Errors
    /// This member can't join.
    pub async fn join(
        &self,
        channel: Channel,
        member: usize,
        wait: bool,
        until: Instant,
    ) -> Result<Joined, JoinError> {
        let mut client = BootstrapClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        let mut pause = PAUSE;
        let (mut missing, mut trouble) = (None, "no answer".to_owned());
        while Instant::now() < until {
            let request = JoinRequest { expected: member as u32, wait, ..self.me.clone() };
            let end = until.min(Instant::now() + ANSWER);
            match tokio::time::timeout_at(end, client.join(request)).await {
                Ok(Ok(reply)) => match examine(reply.into_inner(), member) {
                    Ok((joined, absent)) if absent.is_empty() => return Ok(joined),
                    // A member waits before it names the missing ones. The pause below is for a member that
                    // does not.
                    Ok((_, absent)) => {
                        missing = Some(describe_missing(self.noun, &absent, self.me.size as usize));
                    }
                    // The caller may have reached the first member of another job, which ends soon.
                    Err(JoinError::Differs(what)) if wait => {
                        trouble = format!("the one that answers differs in {what}");
                    }
                    Err(reason) => return Err(reason),
                },
                Ok(Err(status)) if status.code() == Code::Aborted => {
                    return Err(JoinError::Failed(shortened(status.message())));
                }
                // The caller may have reached another program, which ends soon.
                Ok(Err(status)) if status.code() == Code::Unimplemented => {
                    trouble =
                        "the one that answers has no bootstrap service: another program, or a version of \
                               tonic-rdma before 0.1"
                            .into();
                }
                Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                    return Err(JoinError::Refused(shortened(status.message())));
                }
                Ok(Err(status)) => trouble = shortened(&with_causes(status.message(), &status)),
                // `until` cut this call short, so the trouble of an earlier call says more.
                Err(_) if end == until => {}
                Err(_) => {
                    trouble = shortened(&format!("no answer within {ANSWER:?}; before that: {trouble}"))
                }
            }
            tokio::time::sleep_until(until.min(Instant::now() + pause)).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
        // The other member may have called this one, been refused because it differs, and ended. This counts
        // only when the time is over, because that caller may have been a process of an earlier job.
        Err(match self.table.borrow().refusal(member) {
            Some(reason @ (JoinError::Version(_) | JoinError::Differs(_))) => reason.clone(),
            _ => JoinError::Late { missing, trouble },
        })
    }

    /// Opens the call that watches a member, which gave this one `key`.
    ///
    /// # Errors
    /// The member does not answer in time, or refuses.
    pub async fn watch(
        &self,
        channel: Channel,
        key: &Key,
        until: Instant,
    ) -> Result<MemberStateStream, Status> {
        let mut client = BootstrapClient::new(channel).max_decoding_message_size(MAX_STATE_BYTES);
        let request = WatchRequest { key: key.to_vec().into(), number: self.me.number };
        match tokio::time::timeout_at(until, client.watch(request)).await {
            Ok(reply) => reply.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded("it does not answer any more")),
        }
    }

    /// Notes the states that a member reports, until it has left, has failed or is lost. Calls `said` after
    /// each change.
    pub async fn follow(&self, member: usize, mut stream: MemberStateStream, said: impl Fn()) -> WatchEnd {
        loop {
            let message = match stream.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return WatchEnd::Lost("its watch ended without a word".to_owned()),
                Err(status) => return WatchEnd::Lost(with_causes(status.message(), &status)),
            };
            let state = match MemberState::decode(message) {
                Ok(state) => state,
                Err(error) => return WatchEnd::Lost(format!("it sent what can't be read: {error}")),
            };
            let (left, failure) = (state.left, state.failure.clone());
            self.note(member, |other| *other = state);
            said();
            match failure {
                Some(reason) => return WatchEnd::Failed(reason),
                None if left => return WatchEnd::Left,
                None => {}
            }
        }
    }
}

/// Checks the answer of a member. Returns what the caller learns, and which members are missing.
fn examine(reply: JoinReply, expected: usize) -> Result<(Joined, Vec<u32>), JoinError> {
    let JoinReply { version, number, differs, key, missing, members } = reply;
    if version != VERSION {
        return Err(JoinError::Version(version));
    }
    if !differs.is_empty() {
        return Err(JoinError::Differs(shortened(&differs)));
    }
    if number as usize != expected {
        return Err(JoinError::Other(number));
    }
    match Key::try_from(&key[..]) {
        Err(_) if missing.is_empty() => Err(JoinError::Refused("it gave no key".to_owned())),
        key => Ok((Joined { key: key.unwrap_or_default(), members }, missing)),
    }
}

/// How long a call of `Join` is held before its answer names the missing members.
const HOLD: Duration = Duration::from_secs(2);

/// The longest request in bytes.
const MAX_REQUEST: usize = 64 << 10;

/// The service. While the cell is empty, callers try again.
#[derive(Debug)]
pub struct BootstrapService<D>(BootstrapCell<D>);

/// Makes the service of a member.
pub fn service<D: Details>(cell: BootstrapCell<D>) -> BootstrapServer<BootstrapService<D>> {
    BootstrapServer::new(BootstrapService(cell)).max_decoding_message_size(MAX_REQUEST)
}

impl<D> BootstrapService<D> {
    fn bootstrap(&self) -> Result<&Arc<Bootstrap<D>>, Status> {
        self.0.get().ok_or_else(|| Status::unavailable("this process does not connect yet"))
    }
}

#[tonic::async_trait]
impl<D: Details> bootstrap_server::Bootstrap for BootstrapService<D> {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let bootstrap = self.bootstrap()?;
        let (number, wait) = (request.get_ref().number as usize, request.get_ref().wait);
        let process = request.get_ref().process.clone();
        let mut reply =
            JoinReply { version: VERSION, number: bootstrap.number() as u32, ..JoinReply::default() };
        if bootstrap.standing.borrow().left {
            // Another process may listen here soon, so the caller asks again.
            return Err(Status::unavailable(format!("this {} has left", bootstrap.noun)));
        }
        let attempt = match bootstrap.admit(request.into_inner()) {
            // The caller ends, and names the difference too.
            Err(JoinError::Version(_)) => {
                bootstrap.note_heard(number);
                return Ok(Response::new(reply));
            }
            Err(JoinError::Differs(names)) => {
                bootstrap.note_heard(number);
                reply.differs = names;
                return Ok(Response::new(reply));
            }
            Err(JoinError::Refused(reason)) => return Err(Status::failed_precondition(reason)),
            Err(JoinError::Failed(reason)) => {
                // A process of the next job gets the reason too. That does not count: the member of this job
                // still has to get it.
                if !bootstrap.table.borrow().is_another_process(number, &process) {
                    bootstrap.note_heard(number);
                }
                return Err(Status::aborted(reason));
            }
            Err(other) => return Err(Status::internal(format!("{other:?}"))),
            Ok(attempt) => attempt,
        };
        let Some(attempt) = attempt else { return Ok(Response::new(reply)) };
        if wait {
            let mut table = bootstrap.table.subscribe();
            let ends = table.wait_for(|table| table.is_full() || !table.is_latest(number, attempt));
            let _ = tokio::time::timeout(HOLD, ends).await;
            let table = bootstrap.table.borrow();
            if !table.is_latest(number, attempt) {
                return Err(Status::cancelled("the caller has called again"));
            }
            reply.missing = table.missing();
            if !reply.missing.is_empty() {
                return Ok(Response::new(reply));
            }
            reply.members = table.members();
        }
        reply.key = bootstrap.key(number).map(|key| key.to_vec().into()).unwrap_or_default();
        Ok(Response::new(reply))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<proto::MemberState, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let bootstrap = self.bootstrap()?;
        let caller = bootstrap.caller(request.get_ref().number, &request.get_ref().key)?;
        let (send, receive) = mpsc::channel(1);
        tokio::spawn(follow(Arc::clone(bootstrap), caller, send));
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

/// Sends the state of this member, and each change, until this member has left or failed or the caller is
/// gone.
async fn follow<D: Details>(
    bootstrap: Arc<Bootstrap<D>>,
    caller: usize,
    send: mpsc::Sender<Result<proto::MemberState, Status>>,
) {
    let mut states = bootstrap.standing.subscribe();
    loop {
        let now = states.borrow_and_update().encode();
        let last = now.left || now.failure.is_some();
        if send.send(Ok(now)).await.is_err() {
            break;
        }
        tokio::select! {
            // The caller ends its call after the last message.
            changed = states.changed(), if !last => if changed.is_err() { break },
            () = send.closed() => break,
        }
    }
    // The caller knows how this member ended, or has ended itself.
    bootstrap.note_heard(caller);
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use tokio::net::TcpListener;
    use tokio::time::Instant;
    use tokio_stream::Stream;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, Status};

    use super::{
        Bootstrap, JoinError, JoinReply, JoinRequest, VERSION, WatchRequest, endpoint, examine, proto,
    };
    use crate::bootstrap::proto::bootstrap_server::{self, BootstrapServer};
    use crate::bootstrap::state::MemberInfo;

    /// A member that answers at once, each time, that rank 2 is missing. It counts the calls.
    #[derive(Clone, Default)]
    struct Hasty(Arc<AtomicUsize>);

    #[tonic::async_trait]
    impl bootstrap_server::Bootstrap for Hasty {
        async fn join(&self, _: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let missing = vec![2];
            Ok(Response::new(JoinReply { version: VERSION, missing, ..JoinReply::default() }))
        }

        type WatchStream = Pin<Box<dyn Stream<Item = Result<proto::MemberState, Status>> + Send>>;

        async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            Err(Status::unimplemented("nobody joins"))
        }
    }

    #[tokio::test]
    async fn a_member_that_answers_too_soon_is_called_again_after_a_pause() {
        let hasty = Hasty::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tonic::transport::Server::builder().add_service(BootstrapServer::new(hasty.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let (noun, number, size) = ("rank", 1, 3);
        let (common, about) = Default::default();
        let info = MemberInfo { noun, number, size, common, address: address.clone(), about };
        let bootstrap = Bootstrap::<()>::new(info, None).unwrap();
        let channel = endpoint("http", &address).unwrap().connect_lazy();
        let until = Instant::now() + Duration::from_millis(500);
        let late = bootstrap.join(channel, 0, true, until).await.unwrap_err();
        let missing = Some("rank 2 of 3 has not come".to_owned());
        assert_eq!(late, JoinError::Late { missing, trouble: "no answer".to_owned() });
        // The pauses are 2, 4, 8 … 100 ms.
        let calls = hasty.0.load(Ordering::Relaxed);
        assert!(calls <= 15, "{calls} calls in half a second");
    }

    #[test]
    fn answers_that_do_not_fit_are_named() {
        let right =
            JoinReply { version: VERSION, number: 1, key: vec![7; 16].into(), ..JoinReply::default() };
        let why = |reply: JoinReply| examine(reply, 1).map(|_| ()).unwrap_err();
        for version in [0, 2, 9] {
            assert_eq!(why(JoinReply { version, ..JoinReply::default() }), JoinError::Version(version));
        }
        let differs = JoinReply { differs: "the graph".into(), ..right.clone() };
        assert_eq!(why(differs), JoinError::Differs("the graph".into()));
        assert_eq!(why(JoinReply { number: 2, ..right.clone() }), JoinError::Other(2));
        for key in [vec![], vec![7; 15]] {
            let reply = JoinReply { key: key.into(), ..right.clone() };
            assert_eq!(why(reply), JoinError::Refused("it gave no key".into()));
        }
        let (joined, missing) = examine(JoinReply { missing: vec![3], ..right.clone() }, 1).unwrap();
        assert_eq!((joined.key, missing), ([7; 16], vec![3]));
        assert!(examine(right, 1).unwrap().1.is_empty());
    }
}

#[cfg(test)]
mod service_tests {
    use std::collections::HashMap;

    use bytes::Bytes;
    use tonic::Code;

    use super::bootstrap_server::Bootstrap as _;
    use super::*;
    use crate::bootstrap::proto::Member;
    use crate::bootstrap::state::MemberInfo;

    /// Part 0 of two, with its service.
    fn part_0() -> (Arc<Bootstrap<()>>, BootstrapService<()>) {
        let (noun, number, size) = ("part", 0, 2);
        let (common, about) = Default::default();
        let info = MemberInfo { noun, number, size, common, address: "127.0.0.1:1".into(), about };
        let bootstrap = Arc::new(Bootstrap::new(info, Some(vec![[7; 16]; size])).unwrap());
        let cell = BootstrapCell::default();
        cell.set(Arc::clone(&bootstrap)).unwrap();
        (bootstrap, BootstrapService(cell))
    }

    /// The call of a process that says that it is part 1.
    fn part_1(process: &'static [u8]) -> JoinRequest {
        JoinRequest {
            version: VERSION,
            number: 1,
            size: 2,
            process: Bytes::from_static(process),
            member: Some(Member { address: "127.0.0.1:2".into(), about: Bytes::new() }),
            ..JoinRequest::default()
        }
    }

    async fn refused(service: &BootstrapService<()>, request: JoinRequest) -> (Code, String) {
        match service.join(Request::new(request)).await {
            Ok(reply) => panic!("{reply:?}"),
            Err(status) => (status.code(), status.message().to_owned()),
        }
    }

    /// A part that has failed answers for some seconds more. A process of the next job may call it then.
    #[tokio::test]
    async fn each_caller_that_fits_hears_why_a_member_has_failed() {
        let (bootstrap, service) = part_0();
        let reply = service.join(Request::new(part_1(b"the first"))).await.unwrap();
        assert_eq!(reply.get_ref().key.len(), 16);
        bootstrap.fail("the disk is full");
        assert!(bootstrap.has_unread_failure());
        for (process, has_unread_failure) in [(&b"another"[..], true), (b"the first", false)] {
            let why = refused(&service, part_1(process)).await;
            assert_eq!(why, (Code::Aborted, "the disk is full".to_owned()));
            assert_eq!(bootstrap.has_unread_failure(), has_unread_failure, "{process:?}");
        }
        let (code, _) = refused(&service, JoinRequest { size: 3, ..part_1(b"another") }).await;
        assert_eq!(code, Code::FailedPrecondition, "no part of this job");
    }

    /// A part that has left says nothing of a job that is over: the next one may listen at the same address
    /// soon.
    #[tokio::test]
    async fn a_member_that_has_left_lets_callers_ask_again() {
        let (bootstrap, service) = part_0();
        bootstrap.leave();
        let common = HashMap::from([("the graph".to_owned(), "another".to_owned())]);
        for request in [part_1(b"a process"), JoinRequest { common, ..part_1(b"a process") }] {
            let (code, why) = refused(&service, request).await;
            assert_eq!((code, &*why), (Code::Unavailable, "this part has left"));
        }
    }
}
