//! The models pass with the shipping orderings, and each fails with weaker ones.
#![allow(clippy::panic, clippy::print_stdout, reason = "tests")]

use std::any::Any;
use std::panic::catch_unwind;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};

use tonic_rdma_models::{bias, revocation, ring, waking};
use tonic_rdma_verbs::unstable::shared_memory::{Orders, Shipping};

/// Runs each model with the shipping orderings.
macro_rules! pass {
    ($($name:ident: $model:path;)*) => {
        $(#[test]
        fn $name() {
            println!("{}: {} executions", stringify!($name), $model());
        })*
    };
}

pass! {
    content_is_never_torn: ring::content_is_never_torn::<Shipping>;
    places_are_used_again: ring::places_are_used_again::<Shipping>;
    records_skip_the_end: ring::records_skip_the_end::<Shipping>;
    no_news_is_lost: waking::no_news_is_lost::<Shipping>;
    each_request_gets_an_event: waking::each_request_gets_an_event::<Shipping>;
    no_progress_is_lost: waking::no_progress_is_lost::<Shipping>;
    no_work_is_lost: waking::no_work_is_lost::<Shipping>;
    no_record_is_unguarded: waking::no_record_is_unguarded::<Shipping>;
    a_guard_begins_once: waking::a_guard_begins_once::<Shipping>;
    polls_settle_debts: waking::polls_settle_debts::<Shipping>;
    polls_show_progress: waking::polls_show_progress::<Shipping>;
    arming_settles_debts: waking::arming_settles_debts::<Shipping>;
    one_thread_is_inside: bias::one_thread_is_inside::<Shipping>;
    the_bias_moves: bias::the_bias_moves::<Shipping>;
    the_lock_orders_what_is_beside_it: bias::the_lock_orders_what_is_beside_it::<Shipping>;
    copies_by_key_are_discarded: revocation::copies_by_key_are_discarded::<Shipping>;
    copies_of_an_ended_peer_are_discarded: revocation::copies_of_an_ended_peer_are_discarded::<Shipping>;
    entries_come_before_their_keys: revocation::entries_come_before_their_keys::<Shipping>;
    mixed_entries_are_discarded: revocation::mixed_entries_are_discarded::<Shipping>;
    a_ready_end_is_complete: revocation::a_ready_end_is_complete::<Shipping>;
    a_refused_record_is_seen_before_the_end: revocation::a_refused_record_is_seen_before_the_end::<Shipping>;
}

/// Each line weakens one ordering, and names the model that must fail with it, and the beginning of the
/// failure.
macro_rules! fail {
    ($($name:ident: $order:ident = $value:ident, $($model:ident)::+, $failure:literal;)*) => {
        $(#[test]
        fn $name() {
            enum Weakened {}
            impl Orders for Weakened {
                const $order: Ordering = $value;
            }
            let Err(failure) = catch_unwind(|| $($model)::+::<Weakened>()) else {
                panic!("{} = {}: no execution fails", stringify!($order), stringify!($value));
            };
            let text = text_of(&*failure);
            assert!(text.starts_with($failure), "another failure: {text}");
            println!("{} = {}: {text}", stringify!($order), stringify!($value));
        })*
    };
}

fail! {
    publish_relaxed: PUBLISH = Relaxed, ring::content_is_never_torn, "model: ";
    publish_relaxed_at_the_end: PUBLISH = Relaxed, ring::records_skip_the_end, "model: ";
    observe_relaxed: OBSERVE = Relaxed, ring::content_is_never_torn, "model: ";
    give_back_relaxed: GIVE_BACK = Relaxed, ring::places_are_used_again, "Causality violation";
    reclaim_relaxed: RECLAIM = Relaxed, ring::places_are_used_again, "Causality violation";
    news_fence_none: NEWS_FENCE = Relaxed, waking::no_news_is_lost, "model: the owner sleeps";
    news_fence_acq_rel: NEWS_FENCE = AcqRel, waking::no_news_is_lost, "model: the owner sleeps";
    news_fence_acq_rel_and_progress: NEWS_FENCE = AcqRel, waking::no_progress_is_lost, "model: the poller sleeps";
    news_fence_acq_rel_and_guard: NEWS_FENCE = AcqRel, waking::no_record_is_unguarded, "model: the record has no guard";
    news_fence_acq_rel_and_requests: NEWS_FENCE = AcqRel, waking::each_request_gets_an_event, "model: the owner sleeps";
    attention_fence_acq_rel_and_requests: ATTENTION_FENCE = AcqRel, waking::each_request_gets_an_event, "model: the owner sleeps";
    attention_fence_none: ATTENTION_FENCE = Relaxed, waking::no_news_is_lost, "model: the owner sleeps";
    attention_fence_acq_rel: ATTENTION_FENCE = AcqRel, waking::no_news_is_lost, "model: the owner sleeps";
    attention_fence_acq_rel_and_progress: ATTENTION_FENCE = AcqRel, waking::no_progress_is_lost, "model: the poller sleeps";
    attention_fence_none_and_work: ATTENTION_FENCE = Relaxed, waking::no_work_is_lost, "model: the poller sleeps";
    attention_fence_acq_rel_and_work: ATTENTION_FENCE = AcqRel, waking::no_work_is_lost, "model: the poller sleeps";
    notify_fence_none: NOTIFY_FENCE = Relaxed, waking::no_work_is_lost, "model: the poller sleeps";
    notify_fence_acq_rel: NOTIFY_FENCE = AcqRel, waking::no_work_is_lost, "model: the poller sleeps";
    guard_fence_none: GUARD_FENCE = Relaxed, waking::no_record_is_unguarded, "model: the record has no guard";
    guard_fence_acq_rel: GUARD_FENCE = AcqRel, waking::no_record_is_unguarded, "model: the record has no guard";
    owe_relaxed: OWE = Relaxed, waking::polls_settle_debts, "model: the peer sleeps";
    owe_relaxed_and_progress: OWE = Relaxed, waking::polls_show_progress, "model: the peer sleeps";
    settle_relaxed: SETTLE = Relaxed, waking::polls_show_progress, "model: the peer sleeps";
    news_fence_acq_rel_and_debts: NEWS_FENCE = AcqRel, waking::polls_settle_debts, "model: the peer sleeps";
    attention_fence_acq_rel_and_debts: ATTENTION_FENCE = AcqRel, waking::polls_settle_debts, "model: the peer sleeps";
    check_fence_none: CHECK_FENCE = Relaxed, revocation::copies_by_key_are_discarded, "model: a copy of revoked memory";
    check_fence_release: CHECK_FENCE = Release, revocation::copies_by_key_are_discarded, "model: a copy of revoked memory";
    check_fence_none_and_end: CHECK_FENCE = Relaxed, revocation::copies_of_an_ended_peer_are_discarded, "model: a copy of revoked memory";
    check_fence_none_and_entry: CHECK_FENCE = Relaxed, revocation::mixed_entries_are_discarded, "model: an entry of two regions";
    revoke_fence_none: REVOKE_FENCE = Relaxed, revocation::copies_by_key_are_discarded, "model: a copy of revoked memory";
    revoke_fence_acquire: REVOKE_FENCE = Acquire, revocation::copies_by_key_are_discarded, "model: a copy of revoked memory";
    revoke_fence_none_and_end: REVOKE_FENCE = Relaxed, revocation::copies_of_an_ended_peer_are_discarded, "model: a copy of revoked memory";
    insert_relaxed: INSERT = Relaxed, revocation::entries_come_before_their_keys, "model: the entry is torn";
    find_fence_none: FIND_FENCE = Relaxed, revocation::entries_come_before_their_keys, "model: the entry is torn";
    show_relaxed: SHOW = Relaxed, revocation::a_ready_end_is_complete, "model: the end is ready";
    show_relaxed_and_failure: SHOW = Relaxed, revocation::a_refused_record_is_seen_before_the_end, "model: ";
    check_relaxed: CHECK = Relaxed, revocation::a_ready_end_is_complete, "model: the end is ready";
    enter_fence_none: ENTER_FENCE = Relaxed, bias::one_thread_is_inside, "Causality violation";
    enter_fence_acq_rel: ENTER_FENCE = AcqRel, bias::one_thread_is_inside, "Causality violation";
    take_away_fence_none: TAKE_AWAY_FENCE = Relaxed, bias::one_thread_is_inside, "Causality violation";
    take_away_fence_acq_rel: TAKE_AWAY_FENCE = AcqRel, bias::one_thread_is_inside, "Causality violation";
    leave_relaxed: LEAVE = Relaxed, bias::the_bias_moves, "Causality violation";
    claim_relaxed: CLAIM = Relaxed, bias::the_bias_moves, "Causality violation";
    check_relaxed_and_failure: CHECK = Relaxed, revocation::a_refused_record_is_seen_before_the_end, "model: ";
}

/// In the language's model a weaker fence is enough; see [`Orders::REVOKE_FENCE`].
#[test]
fn revoke_fence_release_is_enough() {
    enum Weakened {}
    impl Orders for Weakened {
        const REVOKE_FENCE: Ordering = Release;
    }
    revocation::copies_by_key_are_discarded::<Weakened>();
    revocation::copies_of_an_ended_peer_are_discarded::<Weakened>();
    revocation::mixed_entries_are_discarded::<Weakened>();
}

fn text_of(failure: &(dyn Any + Send)) -> String {
    let text = failure.downcast_ref::<String>().cloned();
    text.or_else(|| failure.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
