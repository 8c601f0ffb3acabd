//! The meeting of the ranks, as rank 0 holds it. This module does no I/O and knows no time.

use tonic::{Code, Status};

use crate::group::proto::{JoinRequest, Member};

/// The version of the protocol.
pub(crate) const VERSION: u32 = 1;

/// The longest text or process number that a rank may send about itself, in bytes.
const MAX_TEXT: usize = 256;

/// The number of refusals that are kept for the error of rank 0.
const MAX_REFUSALS: usize = 4;

/// The ranks that have come.
#[derive(Debug)]
pub(crate) struct Meeting {
    job: String,
    seats: Vec<Option<Seat>>,
    refusals: Vec<String>,
}

#[derive(Debug)]
struct Seat {
    /// The number of the process. That of rank 0 is empty, which no caller's is.
    process: Vec<u8>,
    member: Member,
    /// The number of calls of this process. Only the latest is answered, so that one rank holds one call.
    turn: u64,
}

/// The reason why a process may not join.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("version {0} of the meeting was asked for; this end speaks {VERSION}")]
    Version(u32),
    #[error("the caller belongs to the job {theirs:?}, and this is a meeting of another job")]
    Job { ours: String, theirs: String },
    #[error("rank {rank} came with a size of {theirs}, and rank 0 has {ours}: all ranks need the same")]
    Size { rank: u32, ours: usize, theirs: u32 },
    #[error("rank {rank} of {size}: ranks are from 0 to {}", .size - 1)]
    Rank { rank: u32, size: usize },
    #[error("rank {rank} has come already; this caller, from {second}, is another process")]
    Twice { rank: u32, first: String, second: String },
    #[error("the caller's {0} is empty or longer than 256 bytes")]
    Text(&'static str),
}

impl Refusal {
    /// Describes the refusal for rank 0. Callers do not learn the name of the job, nor the addresses of ranks, because any process that
    /// reaches the port can call.
    fn for_rank_0(&self) -> String {
        match self {
            Self::Job { ours, .. } => format!("{self} ({ours:?})"),
            Self::Twice { first, .. } => format!("{self} (the first is at {first})"),
            _ => self.to_string(),
        }
    }

    fn code(&self) -> Code {
        match self {
            // The caller may have met the rank 0 of another job, and asks again.
            Self::Job { .. } => Code::PermissionDenied,
            Self::Twice { .. } => Code::AlreadyExists,
            _ => Code::FailedPrecondition,
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

impl Meeting {
    /// Opens the meeting of `size` ranks. Rank 0 has come. It never calls, so no caller has its seat.
    pub(crate) fn new(job: &str, size: usize, member: Member) -> Self {
        let mut seats: Vec<Option<Seat>> = (0..size).map(|_| None).collect();
        if let Some(first) = seats.first_mut() {
            *first = Some(Seat { process: Vec::new(), member, turn: 0 });
        }
        Self { job: job.to_owned(), seats, refusals: Vec::new() }
    }

    /// Admits a rank, and returns the number of its call.
    ///
    /// # Errors
    /// The reason why the caller may not join.
    pub(crate) fn admit(&mut self, request: JoinRequest) -> Result<u64, Refusal> {
        let admitted = self.try_admit(request);
        if let Err(refusal) = &admitted
            && self.refusals.len() < MAX_REFUSALS
        {
            let text = refusal.for_rank_0();
            if !self.refusals.contains(&text) {
                self.refusals.push(text);
            }
        }
        admitted
    }

    fn try_admit(&mut self, request: JoinRequest) -> Result<u64, Refusal> {
        let JoinRequest { version, job, rank, size, process, member } = request;
        if version != VERSION {
            return Err(Refusal::Version(version));
        }
        let member = member.unwrap_or_default();
        for (text, name) in [(member.address.as_str(), "address"), (member.host.as_str(), "host")] {
            if !(1..=MAX_TEXT).contains(&text.len()) {
                return Err(Refusal::Text(name));
            }
        }
        if !(1..=MAX_TEXT).contains(&process.len()) {
            return Err(Refusal::Text("process number"));
        }
        if job != self.job {
            let theirs = job.chars().take(MAX_TEXT).collect();
            return Err(Refusal::Job { ours: self.job.clone(), theirs });
        }
        let ours = self.seats.len();
        if size as usize != ours {
            return Err(Refusal::Size { rank, ours, theirs: size });
        }
        let Some(seat) = self.seats.get_mut(rank as usize) else {
            return Err(Refusal::Rank { rank, size: ours });
        };
        match seat {
            Some(seat) if seat.process == process[..] => {
                seat.turn += 1;
                seat.member = member;
                Ok(seat.turn)
            }
            Some(seat) => {
                let first = seat.member.address.clone();
                Err(Refusal::Twice { rank, first, second: member.address })
            }
            None => {
                *seat = Some(Seat { process: process.to_vec(), member, turn: 0 });
                Ok(0)
            }
        }
    }

    /// Returns whether this call of rank `rank` is its latest.
    pub(crate) fn is_latest(&self, rank: usize, turn: u64) -> bool {
        self.seats.get(rank).and_then(Option::as_ref).is_some_and(|seat| seat.turn == turn)
    }

    /// Returns the ranks that have not come.
    pub(crate) fn missing(&self) -> Vec<u32> {
        let seats = (0_u32..).zip(&self.seats);
        seats.filter(|(_, seat)| seat.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Returns all ranks, if all have come.
    pub(crate) fn members(&self) -> Option<Vec<Member>> {
        self.seats.iter().map(|seat| seat.as_ref().map(|seat| seat.member.clone())).collect()
    }

    /// Describes what is missing, and the callers that were refused.
    pub(crate) fn describe(&self) -> String {
        let mut text = describe_missing(&self.missing(), self.seats.len());
        if !self.refusals.is_empty() {
            text = format!("{text}; refused: {}", self.refusals.join("; "));
        }
        text
    }
}

/// Returns a text such as "ranks 2 and 5 of 8 have not come".
pub(crate) fn describe_missing(missing: &[u32], size: usize) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = missing.iter().take(SHOWN).map(u32::to_string).collect();
    match (&names[..], missing.len()) {
        ([], _) => format!("all {size} ranks have come"),
        ([only], _) => format!("rank {only} of {size} has not come"),
        (names, count) if count > SHOWN => {
            format!("ranks {} and {} more of {size} have not come", names.join(", "), count - SHOWN)
        }
        ([first @ .., last], _) => format!("ranks {} and {last} of {size} have not come", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Meeting, Refusal, VERSION, describe_missing};
    use crate::group::proto::{JoinRequest, Member};

    fn member(port: u32) -> Member {
        Member { address: format!("127.0.0.1:{port}"), host: "host".into(), cores: 2 }
    }

    fn join(rank: u32) -> JoinRequest {
        JoinRequest {
            version: VERSION,
            job: "job".into(),
            rank,
            size: 3,
            process: vec![rank as u8].into(),
            member: Some(member(rank)),
        }
    }

    fn meeting() -> Meeting {
        Meeting::new("job", 3, member(0))
    }

    #[test]
    fn a_meeting_ends_when_all_ranks_have_come() {
        let mut meeting = meeting();
        assert_eq!(meeting.describe(), "ranks 1 and 2 of 3 have not come");
        assert_eq!(meeting.admit(join(2)), Ok(0));
        assert_eq!(meeting.describe(), "rank 1 of 3 has not come");
        assert_eq!(meeting.members(), None);
        assert_eq!(meeting.admit(join(2)), Ok(1), "a repeated call replaces the first");
        assert!(meeting.is_latest(2, 1) && !meeting.is_latest(2, 0));
        assert_eq!(meeting.admit(join(1)), Ok(0));
        assert_eq!(meeting.members(), Some(vec![member(0), member(1), member(2)]));
    }

    #[test]
    fn strangers_are_refused_and_the_reason_is_kept() {
        let mut meeting = meeting();
        meeting.admit(join(1)).unwrap();
        let mut refused = |request: JoinRequest| meeting.admit(request).unwrap_err();
        assert_eq!(refused(JoinRequest { version: 9, ..join(2) }), Refusal::Version(9));
        let job = refused(JoinRequest { job: "other".into(), ..join(2) });
        assert_eq!(job, Refusal::Job { ours: "job".into(), theirs: "other".into() });
        assert_eq!(
            job.to_string(),
            "the caller belongs to the job \"other\", and this is a meeting of another job"
        );
        assert_eq!(
            refused(JoinRequest { size: 8, ..join(2) }).to_string(),
            "rank 2 came with a size of 8, and rank 0 has 3: all ranks need the same"
        );
        assert_eq!(refused(join(3)), Refusal::Rank { rank: 3, size: 3 });
        assert_eq!(refused(JoinRequest { member: None, ..join(2) }), Refusal::Text("address"));
        assert_eq!(
            refused(JoinRequest { process: vec![9].into(), member: Some(member(99)), ..join(1) }).to_string(),
            "rank 1 has come already; this caller, from 127.0.0.1:99, is another process"
        );
        let described = meeting.describe();
        assert!(described.starts_with("rank 2 of 3 has not come; refused: version 9"), "{described}");
        assert!(described.contains("a meeting of another job (\"job\")"), "{described}");
    }

    /// Only rank 0's own error names the first one's address. Any process can call.
    #[test]
    fn a_second_process_of_a_rank_does_not_learn_the_address_of_the_first() {
        let mut meeting = meeting();
        meeting.admit(join(1)).unwrap();
        let second = JoinRequest { process: vec![9].into(), member: Some(member(99)), ..join(1) };
        let status = tonic::Status::from(meeting.admit(second).unwrap_err());
        assert!(!status.message().contains("127.0.0.1:1;"), "{status}");
        assert!(
            meeting.describe().ends_with("is another process (the first is at 127.0.0.1:1)"),
            "{}",
            meeting.describe()
        );
    }

    /// Rank 0 holds the meeting and never calls. A caller that says that it is rank 0 must not get the name of the group, nor
    /// change what rank 0 says about itself.
    #[test]
    fn no_caller_takes_the_seat_of_rank_0() {
        let mut meeting = Meeting::new("job", 3, member(0));
        for process in [vec![], vec![0], vec![7; 16]] {
            let caller = JoinRequest { process: process.into(), member: Some(member(99)), ..join(0) };
            assert!(matches!(meeting.admit(caller).unwrap_err(), Refusal::Text(_) | Refusal::Twice { .. }));
        }
        meeting.admit(join(1)).unwrap();
        meeting.admit(join(2)).unwrap();
        assert_eq!(meeting.members().unwrap()[0], member(0));
    }

    #[test]
    fn a_process_has_a_short_number() {
        for process in [vec![], vec![1; 257]] {
            let caller = JoinRequest { process: process.into(), ..join(1) };
            assert_eq!(meeting().admit(caller).unwrap_err(), Refusal::Text("process number"));
        }
    }

    #[test]
    fn many_missing_ranks_are_counted() {
        let missing: Vec<u32> = (1..20).collect();
        let text = describe_missing(&missing, 20);
        assert_eq!(text, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20 have not come");
    }
}
