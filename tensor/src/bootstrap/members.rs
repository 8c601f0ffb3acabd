//! The table of members: which have joined, and which callers were refused. This module does no I/O and reads
//! no clock.

use std::collections::{BTreeSet, HashMap};

use bytes::Bytes;

use crate::bootstrap::proto::{JoinRequest, Member};
use tonic_rdma_verbs::unstable::Versions;

/// The versions of the calls between members. The members of a job start together, from one program, so they
/// need to speak no other.
const VERSIONS: Versions = Versions::only(1);
/// The version of this member.
pub const VERSION: u32 = VERSIONS.newest;

/// The longest address, process number or description that a member may send of itself, in bytes.
const MAX_TEXT: usize = 256;

/// The longest description of a job that callers may send: its entries, and the bytes of all of them.
const MAX_COMMON: usize = 64;
const MAX_COMMON_BYTES: usize = 4096;

/// The number of refusals that are kept for each member and shown in an error, and the number for all members
/// together.
const MAX_REFUSALS: usize = 4;
const MAX_ALL_REFUSALS: usize = 64;
/// The longest text of a refusal that is kept, in characters. Callers write parts of it.
const MAX_REFUSAL: usize = 512;

/// The members that have joined.
#[derive(Debug)]
pub(super) struct MemberTable {
    /// `rank` or `part`.
    noun: &'static str,
    me: usize,
    common: HashMap<String, String>,
    entries: Vec<Option<MemberEntry>>,
    refused: Vec<RefusedCaller>,
}

#[derive(Debug)]
struct MemberEntry {
    /// The number of the process. It is empty for this member, so that no caller has the same one.
    process: Bytes,
    member: Member,
    /// The number of the latest call of this process. Only that call is answered, so that no member keeps
    /// several calls open.
    attempt: u64,
}

/// A caller that was refused.
#[derive(Debug)]
struct RefusedCaller {
    /// The number that the caller says it has. All numbers that no member has count as one.
    number: usize,
    reason: JoinError,
    /// The reason, with details for the error of this member alone. Any process that reaches the port can
    /// call, so `reason`, which callers get, has no address and no value of the job's description.
    text: String,
}

/// Why a member could not join another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinError {
    /// The other one speaks this version.
    Version(u32),
    /// The names of what both do not have in common.
    Differs(String),
    /// Another member answers at that address.
    Other(u32),
    /// The other one refused this member.
    Refused(String),
    /// The other one has failed.
    Failed(String),
    /// The time is over, and not all members have joined, or the other one does not answer.
    Late {
        /// A text that names the missing members, if the other one has named them.
        missing: Option<String>,
        /// Why the last call failed.
        trouble: String,
    },
}

impl MemberTable {
    /// Makes the table. `me` counts as joined. It never calls itself, so no caller gets its entry.
    pub(super) fn new(noun: &'static str, me: &JoinRequest) -> Self {
        let mut entries: Vec<Option<MemberEntry>> = (0..me.size).map(|_| None).collect();
        if let Some(own) = entries.get_mut(me.number as usize) {
            let member = me.member.clone().unwrap_or_default();
            *own = Some(MemberEntry { process: Bytes::new(), member, attempt: 0 });
        }
        Self { noun, me: me.number as usize, common: me.common.clone(), entries, refused: Vec::new() }
    }

    /// Admits a member. Returns the number of its call, or `None` if it fits and expects another member here.
    /// `failure` says why this member has failed, if it has.
    ///
    /// # Errors
    /// The reason why the caller may not join. For a caller that fits it is `failure`, which is no refusal.
    pub(super) fn admit(
        &mut self,
        request: JoinRequest,
        failure: Option<String>,
    ) -> Result<Option<u64>, JoinError> {
        let number = (request.number as usize).min(self.entries.len());
        self.try_admit(request, failure).map_err(|(reason, text)| {
            if matches!(reason, JoinError::Failed(_)) {
                return reason;
            }
            let text: String = text.chars().take(MAX_REFUSAL).collect();
            let reason = match reason {
                JoinError::Differs(names) => JoinError::Differs(names.chars().take(MAX_REFUSAL).collect()),
                other => other,
            };
            let mut of_number = self.refused.iter().filter(|refused| refused.number == number);
            if self.refused.len() < MAX_ALL_REFUSALS
                && of_number.clone().count() < MAX_REFUSALS
                && of_number.all(|known| known.text != text)
            {
                self.refused.push(RefusedCaller { number, reason: reason.clone(), text });
            }
            reason
        })
    }

    fn try_admit(
        &mut self,
        request: JoinRequest,
        failure: Option<String>,
    ) -> Result<Option<u64>, (JoinError, String)> {
        let JoinRequest { version, number, size, expected, process, common, member, wait: _ } = request;
        let (noun, me, ours) = (self.noun, self.me, self.entries.len());
        if !VERSIONS.speaks(version) {
            let text = format!("{noun} {number} speaks version {version} of these calls, not {VERSIONS}");
            return Err((JoinError::Version(version), text));
        }
        let refused = |text: String| Err((JoinError::Refused(text.clone()), text));
        let bytes = common.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        if common.len() > MAX_COMMON || bytes > MAX_COMMON_BYTES {
            return refused("the caller's description is too long".to_owned());
        }
        let member = member.unwrap_or_default();
        for (name, least, length) in [
            ("address", 1, member.address.len()),
            ("process number", 1, process.len()),
            ("description", 0, member.about.len()),
        ] {
            if !(least..=MAX_TEXT).contains(&length) {
                return refused(format!("the caller's {name} is empty or longer than {MAX_TEXT} bytes"));
            }
        }
        if let Some((names, values)) = difference(&self.common, &common) {
            return Err((JoinError::Differs(names), format!("{noun} {number} differs in {values}")));
        }
        if size as usize != ours {
            return refused(format!(
                "{noun} {number} came with a size of {size}, and {noun} {me} has {ours}: all {noun}s need the same"
            ));
        }
        let Some(entry) = self.entries.get_mut(number as usize) else {
            return refused(format!("{noun} {number} of {ours}: {noun}s are from 0 to {}", ours - 1));
        };
        if let Some(reason) = failure {
            return Err((JoinError::Failed(reason), String::new()));
        }
        if expected as usize != me {
            return Ok(None);
        }
        match entry {
            Some(entry) if entry.process == process => {
                entry.attempt += 1;
                entry.member = member;
                Ok(Some(entry.attempt))
            }
            Some(entry) => {
                let address = member.address;
                let text = format!(
                    "{noun} {number} has come already; this caller, from {address}, is another process"
                );
                let known = format!("{text} (the first is at {})", entry.member.address);
                Err((JoinError::Refused(text), known))
            }
            None => {
                *entry = Some(MemberEntry { process, member, attempt: 0 });
                // A process of an earlier job may have called before.
                self.refused.retain(|refused| refused.number != number as usize);
                Ok(Some(0))
            }
        }
    }

    /// Returns whether the entry of `number` belongs to a process other than `process`.
    pub(super) fn is_another_process(&self, number: usize, process: &[u8]) -> bool {
        self.entries.get(number).and_then(Option::as_ref).is_some_and(|entry| entry.process != process)
    }

    /// Returns whether this call of a member is its latest.
    pub(super) fn is_latest(&self, number: usize, attempt: u64) -> bool {
        self.entries.get(number).and_then(Option::as_ref).is_some_and(|entry| entry.attempt == attempt)
    }

    /// Returns the members that have not joined.
    pub(super) fn missing(&self) -> Vec<u32> {
        let entries = (0_u32..).zip(&self.entries);
        entries.filter(|(_, entry)| entry.is_none()).map(|(number, _)| number).collect()
    }

    /// Returns whether all members have joined.
    pub(super) fn is_full(&self) -> bool {
        self.entries.iter().all(Option::is_some)
    }

    /// Returns the members that have joined, in order.
    pub(super) fn members(&self) -> Vec<Member> {
        self.entries.iter().flatten().map(|entry| entry.member.clone()).collect()
    }

    /// Returns why a process that called itself this member was refused last.
    pub(super) fn refusal(&self, member: usize) -> Option<&JoinError> {
        self.refused.iter().rfind(|refused| refused.number == member).map(|refused| &refused.reason)
    }

    /// Describes what is missing, and the callers that were refused.
    pub(super) fn describe(&self) -> String {
        let missing = describe_missing(self.noun, &self.missing(), self.entries.len());
        let refused: Vec<&str> =
            self.refused.iter().take(MAX_REFUSALS).map(|refused| refused.text.as_str()).collect();
        if refused.is_empty() { missing } else { format!("{missing}; refused: {}", refused.join("; ")) }
    }
}

/// Returns the names of what two members do not have in common, and the same with the values.
fn difference(ours: &HashMap<String, String>, theirs: &HashMap<String, String>) -> Option<(String, String)> {
    let names = ours.keys().chain(theirs.keys()).filter(|name| ours.get(*name) != theirs.get(*name));
    let names: BTreeSet<&str> = names.map(String::as_str).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let values = names.iter().map(|name| {
        let [here, there] = [ours, theirs].map(|common| common.get(*name).map_or("", String::as_str));
        format!("{name} (here {here:?}, there {there:?})")
    });
    (!names.is_empty()).then(|| (listed(&names), listed(&values.collect::<Vec<_>>())))
}

/// Returns a text such as "ranks 2 and 5 of 8 have not come".
pub(super) fn describe_missing(noun: &str, missing: &[u32], size: usize) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<String> = missing.iter().take(SHOWN).map(u32::to_string).collect();
    if missing.len() > SHOWN {
        names.push(format!("{} more", missing.len() - SHOWN));
    }
    match &names[..] {
        [] => format!("all {size} {noun}s have come"),
        [only] => format!("{noun} {only} of {size} has not come"),
        names => format!("{noun}s {} of {size} have not come", listed(names)),
    }
}

/// Returns a text such as "a, b and c".
fn listed(names: &[impl AsRef<str>]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    match &names[..] {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        names => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use bytes::Bytes;

    use super::{JoinError, MemberTable, VERSION, describe_missing, difference};
    use crate::bootstrap::proto::{JoinRequest, Member};

    fn member(port: u32) -> Member {
        Member { address: format!("127.0.0.1:{port}"), about: Bytes::from_static(b"host") }
    }

    fn common(entries: &[(&str, &str)]) -> HashMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    fn join(number: u32) -> JoinRequest {
        JoinRequest {
            version: VERSION,
            number,
            size: 3,
            expected: 0,
            process: vec![number as u8].into(),
            common: common(&[("the job", "job")]),
            member: Some(member(number)),
            wait: true,
        }
    }

    fn table() -> MemberTable {
        MemberTable::new("rank", &join(0))
    }

    #[test]
    fn the_table_is_full_when_all_ranks_have_joined() {
        let mut table = table();
        assert_eq!(table.describe(), "ranks 1 and 2 of 3 have not come");
        assert_eq!(table.admit(join(2), None), Ok(Some(0)));
        assert_eq!(table.describe(), "rank 1 of 3 has not come");
        assert!(!table.is_full());
        assert_eq!(table.admit(join(2), None), Ok(Some(1)), "a repeated call replaces the first");
        assert!(table.is_latest(2, 1) && !table.is_latest(2, 0));
        assert_eq!(
            table.admit(JoinRequest { expected: 2, ..join(1) }, None),
            Ok(None),
            "it looks for rank 2"
        );
        assert_eq!(table.admit(join(1), None), Ok(Some(0)));
        assert!(table.is_full());
        assert_eq!(table.members(), [member(0), member(1), member(2)]);
    }

    #[test]
    fn callers_that_do_not_fit_are_refused_and_the_reason_is_kept() {
        let mut table = table();
        table.admit(join(1), None).unwrap();
        let mut refused = |request: JoinRequest| table.admit(request, None).unwrap_err();
        let text = |reason: JoinError| match reason {
            JoinError::Refused(text) => text,
            other => panic!("{other:?}"),
        };
        for version in [9, 2, 0] {
            assert_eq!(refused(JoinRequest { version, ..join(2) }), JoinError::Version(version));
        }
        let other = refused(JoinRequest { common: common(&[("the job", "other")]), ..join(2) });
        assert_eq!(other, JoinError::Differs("the job".into()));
        assert_eq!(
            text(refused(JoinRequest { size: 8, ..join(2) })),
            "rank 2 came with a size of 8, and rank 0 has 3: all ranks need the same"
        );
        assert_eq!(text(refused(join(3))), "rank 3 of 3: ranks are from 0 to 2");
        let empty = "the caller's address is empty or longer than 256 bytes";
        assert_eq!(text(refused(JoinRequest { member: None, ..join(2) })), empty);
        let long = Member { about: vec![0; 257].into(), ..member(2) };
        assert!(text(refused(JoinRequest { member: Some(long), ..join(2) })).contains("longer than 256"));
        let many = (0..65).map(|name| (name.to_string(), String::new())).collect();
        for many in [many, common(&[("long", &"x".repeat(5000))])] {
            let many = JoinRequest { common: many, ..join(2) };
            assert_eq!(text(refused(many)), "the caller's description is too long");
        }
        assert_eq!(
            text(refused(JoinRequest { process: vec![9].into(), member: Some(member(99)), ..join(1) })),
            "rank 1 has come already; this caller, from 127.0.0.1:99, is another process"
        );
        let described = table.describe();
        assert!(
            described.starts_with("rank 2 of 3 has not come; refused: rank 2 speaks version 9"),
            "{described}"
        );
        assert!(
            described.contains("rank 2 differs in the job (here \"job\", there \"other\")"),
            "{described}"
        );
    }

    /// Any process can call, so a flood of bad calls must not fill the memory, nor hide why a member was
    /// refused.
    #[test]
    fn refusals_of_each_member_are_bounded() {
        let mut table = table();
        for version in 2..100 {
            for number in 1..50 {
                table.admit(JoinRequest { version, ..join(number) }, None).unwrap_err();
            }
        }
        assert_eq!(table.refused.len(), 3 * super::MAX_REFUSALS);
        assert_eq!(table.refusal(2), Some(&JoinError::Version(5)));
        table.admit(join(2), None).unwrap();
        assert_eq!(table.refusal(2), None, "the right process came later");

        table.refused.clear();
        for number in 1..3 {
            let long = common(&[("job", &"é".repeat(2000))]);
            table.admit(JoinRequest { common: long, ..join(number) }, None).unwrap_err();
        }
        let texts: Vec<_> = table.refused.iter().map(|refused| refused.text.chars().count()).collect();
        assert_eq!(texts, [super::MAX_REFUSAL; 2]);
    }

    /// Only the error of the member that is joined names the address of the first process, because any
    /// process can call.
    #[test]
    fn a_second_process_of_a_rank_does_not_learn_the_address_of_the_first() {
        let mut table = table();
        table.admit(join(1), None).unwrap();
        let second = JoinRequest { process: vec![9].into(), member: Some(member(99)), ..join(1) };
        let JoinError::Refused(text) = table.admit(second, None).unwrap_err() else { panic!() };
        assert!(!text.contains("127.0.0.1:1;") && !text.ends_with("127.0.0.1:1"), "{text}");
        let described = table.describe();
        assert!(described.ends_with("is another process (the first is at 127.0.0.1:1)"), "{described}");
    }

    /// A member never calls itself. A caller that says that it is this member must not get a key, nor change
    /// what the member says about itself.
    #[test]
    fn no_caller_gets_the_entry_of_rank_0() {
        let mut table = table();
        for process in [vec![], vec![0], vec![7; 16]] {
            let caller = JoinRequest { process: process.into(), member: Some(member(99)), ..join(0) };
            assert!(matches!(table.admit(caller, None).unwrap_err(), JoinError::Refused(_)));
        }
        table.admit(join(1), None).unwrap();
        table.admit(join(2), None).unwrap();
        assert_eq!(table.members()[0], member(0));
    }

    #[test]
    fn a_process_has_a_short_number() {
        for process in [vec![], vec![1; 257]] {
            let caller = JoinRequest { process: process.into(), ..join(1) };
            let text = "the caller's process number is empty or longer than 256 bytes".to_owned();
            assert_eq!(table().admit(caller, None).unwrap_err(), JoinError::Refused(text));
        }
    }

    #[test]
    fn many_missing_ranks_are_counted() {
        let missing: Vec<u32> = (1..20).collect();
        let text = describe_missing("rank", &missing, 20);
        assert_eq!(text, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20 have not come");
    }

    #[test]
    fn differences_are_named() {
        let ours = common(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let names = |theirs: &[(&str, &str)]| difference(&ours, &common(theirs)).map(|(names, _)| names);
        assert_eq!(names(&[("c", "3"), ("a", "1"), ("b", "2")]), None);
        assert_eq!(names(&[("a", "1"), ("b", "9"), ("c", "3")]).as_deref(), Some("b"));
        assert_eq!(names(&[("a", "1"), ("d", "2")]).as_deref(), Some("b, c and d"));
    }
}
