//! Calls to the service of another member, and the watch over it.

use std::time::Duration;

use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Status, Streaming};
use tonic_rdma_verbs::internal::{chain, with_causes};

use crate::meeting::proto::meeting_client::MeetingClient;
use crate::meeting::proto::{self, JoinReply, JoinRequest, Member, WatchRequest};
use crate::meeting::seats::{NotJoined, VERSION, describe_missing};
use crate::meeting::state::{Details, End, Key, Meeting, Standing, shortened};

/// The longest time to make a connection, and for the answer to one call.
const ANSWER: Duration = Duration::from_secs(5);

/// How often a quiet connection is checked, and how long the answer may take. A host that vanishes is found so.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_LIMIT: Duration = Duration::from_secs(20);

/// The pause before a member is called again: at first, and at most.
const PAUSE: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The longest answer in bytes: all members of the largest group.
const MAX_ANSWER: usize = 4 << 20;

/// What a member says of itself to one that watches it.
pub type StandingStream = Streaming<proto::Standing>;

/// What a member learns that joins another one.
#[derive(Debug)]
pub struct Joined {
    /// What all calls to that member carry.
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

impl<D: Details> Meeting<D> {
    /// Joins another member, again and again until it answers or the time is over. With `wait` the answer comes when all have joined it.
    ///
    /// # Errors
    /// This member can't join.
    pub async fn join(
        &self,
        channel: Channel,
        member: usize,
        wait: bool,
        until: Instant,
    ) -> Result<Joined, NotJoined> {
        let mut client = MeetingClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        let mut pause = PAUSE;
        let (mut missing, mut trouble) = (None, "no answer".to_owned());
        while Instant::now() < until {
            let request = JoinRequest { expected: member as u32, wait, ..self.me.clone() };
            let end = until.min(Instant::now() + ANSWER);
            match tokio::time::timeout_at(end, client.join(request)).await {
                Ok(Ok(reply)) => match examine(reply.into_inner(), member) {
                    Ok((joined, absent)) if absent.is_empty() => return Ok(joined),
                    Ok((_, absent)) => {
                        missing = Some(describe_missing(self.noun, &absent, self.me.size as usize));
                        continue;
                    }
                    // The caller may have met the first member of another job, which ends soon.
                    Err(NotJoined::Differs(what)) if wait => {
                        trouble = format!("the one that answers differs in {what}");
                    }
                    Err(reason) => return Err(reason),
                },
                Ok(Err(status)) if status.code() == Code::Aborted => {
                    return Err(NotJoined::Failed(shortened(status.message())));
                }
                Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                    return Err(NotJoined::Refused(shortened(status.message())));
                }
                Ok(Err(status)) => trouble = shortened(&with_causes(status.message(), &status)),
                // A call that had no time left says less than an earlier one.
                Err(_) if end == until => {}
                Err(_) => {
                    trouble = shortened(&format!("no answer within {ANSWER:?}; before that: {trouble}"))
                }
            }
            tokio::time::sleep_until(until.min(Instant::now() + pause)).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
        // The other one may have called, have found that it differs, and have ended. Before the time is over, that is no reason to end: the
        // caller may be a process of an earlier job, and the right one may come later.
        Err(match self.seats.borrow().refusal(member) {
            Some(reason @ (NotJoined::Version(_) | NotJoined::Differs(_))) => reason.clone(),
            _ => NotJoined::Late { missing, trouble },
        })
    }

    /// Opens the call that watches a member, which gave this one `key`.
    ///
    /// # Errors
    /// The member does not answer in time, or refuses.
    pub async fn watch(&self, channel: Channel, key: &Key, until: Instant) -> Result<StandingStream, Status> {
        let mut client = MeetingClient::new(channel);
        let request = WatchRequest { key: key.to_vec().into(), number: self.me.number };
        match tokio::time::timeout_at(until, client.watch(request)).await {
            Ok(reply) => reply.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded("it does not answer any more")),
        }
    }

    /// Notes what a member says of itself, until it has left, has failed or is lost. Calls `said` after each change.
    pub async fn follow(&self, member: usize, mut stream: StandingStream, said: impl Fn()) -> End {
        loop {
            let message = match stream.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return End::Lost("its watch ended without a word".to_owned()),
                Err(status) => return End::Lost(with_causes(status.message(), &status)),
            };
            let standing = match Standing::decode(message) {
                Ok(standing) => standing,
                Err(error) => return End::Lost(format!("it sent what can't be read: {error}")),
            };
            let (left, failure) = (standing.left, standing.failure.clone());
            self.note(member, |other| *other = standing);
            said();
            match failure {
                Some(reason) => return End::Failed(reason),
                None if left => return End::Left,
                None => {}
            }
        }
    }
}

/// Checks the answer of a member. Returns what the caller learns, and which members are missing.
fn examine(reply: JoinReply, expected: usize) -> Result<(Joined, Vec<u32>), NotJoined> {
    let JoinReply { version, number, differs, key, missing, members } = reply;
    if version != VERSION {
        return Err(NotJoined::Version(version));
    }
    if !differs.is_empty() {
        return Err(NotJoined::Differs(shortened(&differs)));
    }
    if number as usize != expected {
        return Err(NotJoined::Other(number));
    }
    match Key::try_from(&key[..]) {
        Err(_) if missing.is_empty() => Err(NotJoined::Refused("it gave no key".to_owned())),
        key => Ok((Joined { key: key.unwrap_or_default(), members }, missing)),
    }
}

#[cfg(test)]
mod tests {
    use super::{JoinReply, NotJoined, VERSION, examine};

    #[test]
    fn answers_that_do_not_fit_are_named() {
        let right =
            JoinReply { version: VERSION, number: 1, key: vec![7; 16].into(), ..JoinReply::default() };
        let why = |reply: JoinReply| examine(reply, 1).map(|_| ()).unwrap_err();
        assert_eq!(why(JoinReply { version: 9, ..JoinReply::default() }), NotJoined::Version(9));
        let differs = JoinReply { differs: "the graph".into(), ..right.clone() };
        assert_eq!(why(differs), NotJoined::Differs("the graph".into()));
        assert_eq!(why(JoinReply { number: 2, ..right.clone() }), NotJoined::Other(2));
        for key in [vec![], vec![7; 15]] {
            let reply = JoinReply { key: key.into(), ..right.clone() };
            assert_eq!(why(reply), NotJoined::Refused("it gave no key".into()));
        }
        let (joined, missing) = examine(JoinReply { missing: vec![3], ..right.clone() }, 1).unwrap();
        assert_eq!((joined.key, missing), ([7; 16], vec![3]));
        assert!(examine(right, 1).unwrap().1.is_empty());
    }
}
