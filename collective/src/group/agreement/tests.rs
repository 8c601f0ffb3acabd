//! Agreements of many ranks over a simulated network: any order of questions and answers, and deaths at any
//! time.

use std::collections::{BTreeMap, BTreeSet};

use super::{Move, Proposal, Standing};

/// Ranks, of which some are dead.
struct World {
    random: fastrand::Rng,
    ranks: Vec<Rank>,
    dead: BTreeSet<usize>,
    /// Whether ranks suspect living ones. Then a rank may have to leave, and counts as dead from then on.
    errs: bool,
    /// The generations of which a rank has reported an error.
    failed: BTreeSet<u64>,
    /// The members of each generation that a living or dead rank was in.
    seen: BTreeMap<u64, Vec<usize>>,
}

#[derive(Clone)]
struct Rank {
    standing: Standing,
    answers: BTreeMap<usize, Standing>,
    proposed: Option<(Proposal, BTreeSet<usize>)>,
    left: Option<String>,
}

impl World {
    fn new(size: usize, seed: u64) -> Self {
        let standing = Standing { generation: 1, members: (0..size).collect(), ..Standing::default() };
        let rank = Rank { standing, answers: BTreeMap::new(), proposed: None, left: None };
        let seen = BTreeMap::from([(1, (0..size).collect())]);
        Self {
            random: fastrand::Rng::with_seed(seed),
            ranks: vec![rank; size],
            dead: BTreeSet::new(),
            errs: false,
            failed: BTreeSet::new(),
            seen,
        }
    }

    fn living(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| !self.dead.contains(rank)).collect()
    }

    /// A rank whose group has lost a member agrees, as its user calls `shrink` after the error.
    fn begin(&mut self, me: usize) {
        let standing = &self.ranks[me].standing;
        let mut fails = standing.members.iter().any(|rank| self.dead.contains(rank));
        fails |= self.failed.contains(&standing.generation);
        if self.errs && self.random.u8(..) == 0 {
            // The deadline of an operation, because a member is in another group. All members hear of it.
            let is_elsewhere = |rank: &usize| self.ranks[*rank].standing.generation != standing.generation;
            if standing.members.iter().any(is_elsewhere) {
                self.failed.insert(standing.generation);
                fails = true;
            }
        }
        let rank = &mut self.ranks[me];
        if fails && !rank.standing.agreeing {
            rank.standing.agreeing = true;
            rank.answers.clear();
            rank.proposed = None;
        }
    }

    fn adopt(&mut self, me: usize, generation: u64, members: Vec<usize>) {
        let known = self.seen.entry(generation).or_insert_with(|| members.clone());
        let is_common = known.iter().any(|rank| members.contains(rank));
        assert!(
            *known == members || self.errs && !is_common,
            "generation {generation} has two lists of members"
        );
        let rank = &mut self.ranks[me];
        assert!(generation > rank.standing.generation);
        rank.standing.adopt(generation, members);
        rank.proposed = None;
        rank.answers.clear();
    }

    /// Rank `me` does one thing: asks one rank, asks for one promise, or decides.
    fn step(&mut self, me: usize) {
        self.begin(me);
        if !self.ranks[me].standing.agreeing {
            return;
        }
        if let Some((proposal, promises)) = self.ranks[me].proposed.clone() {
            let open: Vec<usize> = proposal
                .members
                .iter()
                .copied()
                .filter(|rank| *rank != me && !promises.contains(rank))
                .collect();
            if open.is_empty() {
                return self.adopt(me, proposal.generation, proposal.members);
            }
            let other = *self.random.choice(&open).unwrap();
            let promised =
                !self.dead.contains(&other) && self.ranks[other].standing.promise(other, &proposal).is_ok();
            // The answer may be lost.
            if promised && self.random.u8(..) > 10 {
                let (_, promises) = self.ranks[me].proposed.as_mut().unwrap();
                promises.insert(other);
            } else {
                self.ranks[me].proposed = None;
                self.ranks[me].answers.clear();
            }
            return;
        }
        let unasked: Vec<usize> = {
            let rank = &self.ranks[me];
            rank.standing.to_ask(me).into_iter().filter(|other| !rank.answers.contains_key(other)).collect()
        };
        if let Some(other) = self.random.choice(&unasked).copied() {
            if self.dead.contains(&other) {
                self.ranks[me].standing.suspect(other, "it is dead");
            } else {
                let answer = self.ranks[other].standing.clone();
                self.ranks[me].answers.insert(other, answer);
            }
            return;
        }
        let rank = &mut self.ranks[me];
        match rank.standing.next(me, &rank.answers) {
            Move::Wait => rank.answers.clear(),
            Move::Leave(_) if self.errs => {
                self.dead.insert(me);
            }
            Move::Leave(reason) => rank.left = Some(reason),
            Move::Adopt { generation, members } => self.adopt(me, generation, members),
            Move::Propose(proposal) => {
                if rank.standing.promise(me, &proposal).is_ok() {
                    rank.proposed = Some((proposal, BTreeSet::new()));
                }
            }
        }
    }

    /// Runs until every living rank is in a group of exactly the living ranks.
    fn run(&mut self, deaths: usize) {
        let mut deaths = deaths;
        for step in 0.. {
            assert!(step < 200_000, "the agreement does not end");
            let living = self.living();
            if deaths > 0 && living.len() > 1 && self.random.u32(..60) == 0 {
                let dies = *self.random.choice(&living).unwrap();
                self.dead.insert(dies);
                deaths -= 1;
                continue;
            }
            let me = *self.random.choice(&living).unwrap();
            self.step(me);
            assert_eq!(self.ranks[me].left, None, "rank {me} lives and left");
            let done = |rank: &usize| {
                self.ranks[*rank].standing.members == living && !self.ranks[*rank].standing.agreeing
            };
            if deaths == 0 && living.iter().all(done) {
                break;
            }
        }
        let generations: BTreeSet<u64> =
            self.living().iter().map(|rank| self.ranks[*rank].standing.generation).collect();
        assert_eq!(generations.len(), 1, "the survivors are in one generation");
    }
}

#[test]
fn all_survivors_agree_whatever_dies_and_when() {
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.usize(2..=9);
        let deaths = random.usize(1..size);
        World::new(size, seed).run(deaths);
    }
}

#[test]
fn wrong_suspicions_end_with_groups_in_which_all_members_agree() {
    let mut split = 0;
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.usize(2..=8);
        let mut world = World::new(size, seed);
        world.errs = true;
        let mut wrong = random.usize(1..=3);
        for step in 0.. {
            assert!(step < 200_000, "seed {seed}: the agreement does not end");
            let living = world.living();
            if living.is_empty() {
                break;
            }
            let me = *random.choice(&living).unwrap();
            if wrong > 0 && random.u32(..40) == 0 {
                wrong -= 1;
                let suspect = *random.choice(&world.ranks[me].standing.members).unwrap();
                if suspect != me {
                    let standing = &mut world.ranks[me].standing;
                    standing.suspect(suspect, "a wrong suspicion");
                    world.failed.insert(standing.generation);
                }
            }
            world.step(me);
            let settled = |rank: &usize| {
                let standing = &world.ranks[*rank].standing;
                let same = |other: &usize| {
                    let other = &world.ranks[*other].standing;
                    (other.generation, &other.members) == (standing.generation, &standing.members)
                };
                let alive = standing.members.iter().all(|member| !world.dead.contains(member));
                !standing.agreeing && alive && standing.members.iter().all(same)
            };
            let living = world.living();
            if wrong == 0 && living.iter().all(settled) {
                let groups: BTreeSet<&Vec<usize>> =
                    living.iter().map(|rank| &world.ranks[*rank].standing.members).collect();
                split += usize::from(groups.len() > 1);
                break;
            }
        }
    }
    // Two ranks that suspect one another, and no third one between them.
    assert!(split < 300, "{split} of 3000 worlds have two groups");
}

fn standing(generation: u64, members: &[usize], suspects: &[usize]) -> Standing {
    let suspects = suspects.iter().map(|rank| (*rank, "a test".to_owned())).collect();
    Standing { generation, members: members.to_vec(), agreeing: true, promised: 0, suspects }
}

#[test]
fn of_two_ranks_that_suspect_one_another_the_higher_leaves() {
    let all = [0, 1, 2, 3];
    let answers = BTreeMap::from([
        (1, standing(1, &all, &[2])),
        (2, standing(1, &all, &[1])),
        (3, standing(1, &all, &[])),
    ]);
    let Move::Propose(proposal) = standing(1, &all, &[]).next(0, &answers) else { panic!("no proposal") };
    assert_eq!(proposal.members, [0, 1, 3]);
}

#[test]
fn a_coordinator_that_a_living_rank_suspects_leaves() {
    let answers = BTreeMap::from([(1, standing(1, &[0, 1], &[0]))]);
    let next = standing(1, &[0, 1], &[]).next(0, &answers);
    assert_eq!(next, Move::Leave("rank 1 found it lost: a test".into()));
}

#[test]
fn a_rank_that_wakes_up_after_an_agreement_leaves() {
    let answers = BTreeMap::from([(1, standing(2, &[1, 2], &[0]))]);
    let next = standing(1, &[0, 1, 2], &[]).next(0, &answers);
    assert_eq!(next, Move::Leave("rank 1 is in a later group without it".into()));
}

#[test]
fn promises_are_given_once_to_the_coordinator_and_only_by_agreeing_members() {
    let proposal = Proposal { generation: 2, coordinator: 0, members: vec![0, 1] };
    let mut rank = standing(1, &[0, 1, 2], &[2]);
    assert_eq!(rank.promise(1, &proposal), Ok(()));
    assert!(rank.promise(1, &proposal).unwrap_err().contains("has promised 2"));
    let newer = Proposal { generation: 3, ..proposal.clone() };
    let refused = |rank: &Standing, proposal: &Proposal| rank.clone().promise(1, proposal).unwrap_err();
    assert!(refused(&rank, &Proposal { members: vec![0, 2], ..newer.clone() }).contains("not among"));
    assert!(refused(&rank, &Proposal { members: vec![1, 0], ..newer.clone() }).contains("no list"));
    assert!(
        refused(&rank, &Proposal { members: vec![0, 1, 2], ..newer.clone() }).contains("found rank 2 lost")
    );
    assert!(refused(&rank, &Proposal { coordinator: 1, ..newer.clone() }).contains("takes rank 0"));
    rank.agreeing = false;
    assert!(refused(&rank, &newer).contains("does not wait"));
}
