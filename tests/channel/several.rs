//! One channel over several endpoints.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::mpsc::Sender;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tonic_rdma::{CallConfig, EndpointState, RdmaChannel};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use crate::servers::{Kind, Running, check, everywhere};
use support::{Child, Port, Runtime, ScriptedGreeter, config, say, until};

fn is_up(channel: &RdmaChannel, index: usize) -> bool {
    matches!(channel.endpoints()[index].state, EndpointState::Up(_))
}

async fn all_up(channel: &RdmaChannel) {
    until(|| (0..channel.endpoints().len()).all(|index| is_up(channel, index))).await;
}

fn balance(servers: &[Running]) -> RdmaChannel {
    RdmaChannel::balance(servers.iter().map(Running::endpoint)).config(config()).connect_lazy()
}

/// Makes a channel whose endpoints come and go.
fn changing() -> (RdmaChannel, Sender<Change<&'static str, Endpoint>>) {
    RdmaChannel::balance([]).config(config()).balance_channel(4)
}

#[test]
fn calls_spread_over_servers_of_all_kinds() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (mut servers, mut greeters) = (Vec::new(), Vec::new());
            for kind in Kind::ALL {
                let greeter = ScriptedGreeter::new();
                servers.push(kind.serve(&greeter).await);
                greeters.push(greeter);
            }
            let channel = balance(&servers);
            all_up(&channel).await;
            let mut client = GreeterClient::new(channel.clone());
            for _ in 0..300 {
                assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            }
            for greeter in &greeters {
                assert!(greeter.calls() >= 40, "{} of 300 calls", greeter.calls());
            }
        });
    }
}

#[test]
fn a_call_goes_to_the_endpoint_with_fewer_calls() {
    everywhere(async |kind| {
        let greeters = [ScriptedGreeter::new(), ScriptedGreeter::new()];
        let servers = [kind.serve(&greeters[0]).await, kind.serve(&greeters[1]).await];
        let channel = balance(&servers);
        all_up(&channel).await;
        let mut calls = tokio::task::JoinSet::new();
        for held in 1..=10 {
            let mut client = GreeterClient::new(channel.clone());
            calls.spawn(async move { say(&mut client, "hold").await });
            until(|| greeters.iter().map(ScriptedGreeter::held).sum::<usize>() == held).await;
        }
        assert_eq!(greeters.each_ref().map(ScriptedGreeter::held), [5, 5]);
        assert_eq!(channel.endpoints().iter().map(|endpoint| endpoint.calls).sum::<usize>(), 10);
        greeters.iter().for_each(|greeter| greeter.release(5));
        for reply in calls.join_all().await {
            assert_eq!(reply.unwrap(), "held");
        }
    });
}

#[test]
fn endpoints_that_are_down_get_no_calls_and_the_last_failure_is_named() {
    Runtime::MultiThread.run(async {
        let dead = [Port::reserve(), Port::reserve()];
        let channel = RdmaChannel::balance(dead.each_ref().map(Port::endpoint)).connect_lazy();
        let status = say(&mut GreeterClient::new(channel.clone()), "hello").await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("all 2 endpoints are down"), "{status}");
        let error = RdmaChannel::balance(dead.each_ref().map(Port::endpoint)).connect().await.unwrap_err();
        assert!(error.to_string().contains("all 2 endpoints are down"), "{error}");
        // One comes up: no call is needed to find it.
        let (greeter, address) = (ScriptedGreeter::new(), dead[0].address.to_string());
        let _running = Kind::Native.serve_at(&address, &greeter, CallConfig::default()).await;
        until(|| is_up(&channel, 0)).await;
        let mut client = GreeterClient::new(channel.clone());
        for _ in 0..50 {
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
        }
        assert_eq!(greeter.calls(), 50);
    });
}

#[test]
fn a_killed_server_fails_few_calls_and_comes_back() {
    for kind in Kind::ALL {
        Runtime::MultiThread.run(async {
            let (port, alive) = (Port::reserve(), kind.serve(&ScriptedGreeter::new()).await);
            let role = format!("serve {kind:?} {}", port.address);
            let start = || {
                let role = role.clone();
                async { tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap() }
            };
            let doomed = start().await;
            let endpoints = [alive.endpoint(), port.endpoint()];
            let channel = RdmaChannel::balance(endpoints).config(config()).connect_lazy();
            all_up(&channel).await;
            let mut client = GreeterClient::new(channel.clone());
            let mut failed = 0;
            tokio::task::spawn_blocking(move || drop(doomed)).await.unwrap();
            until(|| !is_up(&channel, 1)).await;
            for _ in 0..100 {
                failed += usize::from(say(&mut client, "hello").await.is_err());
            }
            assert_eq!(failed, 0, "calls after the death was seen");
            let _back = start().await;
            until(|| is_up(&channel, 1)).await;
            let mut processes: HashMap<String, usize> = HashMap::new();
            for _ in 0..100 {
                *processes.entry(say(&mut client, "process").await.unwrap()).or_default() += 1;
            }
            assert_eq!(processes.len(), 2, "{processes:?}");
        });
    }
}

#[test]
fn a_change_is_in_force_for_the_next_call() {
    everywhere(async |kind| {
        let greeters = [ScriptedGreeter::new(), ScriptedGreeter::new()];
        let [one, other] = [kind.serve(&greeters[0]).await, kind.serve(&greeters[1]).await];
        let (channel, changes) = changing();
        let mut client = GreeterClient::new(channel.clone());
        let status = say(&mut client, "hello").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "there is no endpoint to call"));
        let expect = async |counts: [usize; 2]| {
            let mut client = GreeterClient::new(channel.clone());
            for _ in 0..10 {
                assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            }
            assert_eq!(greeters.each_ref().map(ScriptedGreeter::calls), counts);
            check(&channel, kind);
            assert_eq!(channel.endpoints().len(), 1);
        };
        changes.send(Change::Insert("a", one.endpoint())).await.unwrap();
        expect([10, 0]).await;
        changes.send(Change::Insert("b", other.endpoint())).await.unwrap();
        changes.send(Change::Remove("a")).await.unwrap();
        changes.send(Change::Remove("nobody")).await.unwrap();
        expect([10, 10]).await;
        changes.send(Change::Insert("b", one.endpoint())).await.unwrap();
        expect([20, 10]).await;
        drop(changes);
        expect([30, 10]).await;
    });
}

#[test]
fn endpoints_of_the_builder_stay_and_others_are_connected_without_a_call() {
    everywhere(async |kind| {
        let servers = [kind.serve(&ScriptedGreeter::new()).await, kind.serve(&ScriptedGreeter::new()).await];
        let builder = RdmaChannel::balance([servers[0].endpoint()]).config(config());
        let (channel, changes) = builder.balance_channel(1);
        changes.send(Change::Insert(0, servers[1].endpoint())).await.unwrap();
        until(|| channel.endpoints().len() == 2).await;
        all_up(&channel).await;
        changes.send(Change::Remove(0)).await.unwrap();
        until(|| channel.endpoints().len() == 1).await;
        assert!(is_up(&channel, 0));
    });
}

#[test]
fn no_call_fails_while_endpoints_come_and_go() {
    everywhere(async |kind| {
        const ROUNDS: usize = 10;
        let greeters = [ScriptedGreeter::new(), ScriptedGreeter::new()];
        let servers = [kind.serve(&greeters[0]).await, kind.serve(&greeters[1]).await];
        let (channel, changes) = changing();
        changes.send(Change::Insert("a", servers[0].endpoint())).await.unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (mut client, ends) = (GreeterClient::new(channel.clone()), Arc::clone(&ends));
            callers.spawn(async move {
                while !ends.load(Ordering::SeqCst) {
                    assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
                    tokio::task::yield_now().await;
                }
            });
        }
        // One endpoint takes the place of the other, while calls are in flight on both.
        for round in 0..ROUNDS {
            let (index, keys) = ((round + 1) % 2, [["a", "b"], ["b", "a"]][round % 2]);
            changes.send(Change::Insert(keys[1], servers[index].endpoint())).await.unwrap();
            changes.send(Change::Remove(keys[0])).await.unwrap();
            let before = greeters[index].calls();
            until(|| greeters[index].calls() > before + 20).await;
        }
        ends.store(true, Ordering::SeqCst);
        callers.join_all().await;
        until(|| channel.endpoints().len() == 1).await;
    });
}

#[test]
fn a_call_in_flight_outlives_its_endpoints_removal() {
    everywhere(async |kind| {
        let greeter = ScriptedGreeter::new();
        let running = kind.serve(&greeter).await;
        let (channel, changes) = changing();
        changes.send(Change::Insert("a", running.endpoint())).await.unwrap();
        let mut client = GreeterClient::new(channel.clone());
        let mut held = client.clone();
        let call = tokio::spawn(async move { say(&mut held, "hold").await });
        until(|| greeter.held() == 1).await;
        changes.send(Change::Remove("a")).await.unwrap();
        assert_eq!(say(&mut client, "hello").await.unwrap_err().code(), Code::Unavailable);
        greeter.release(1);
        assert_eq!(call.await.unwrap().unwrap(), "held");
    });
}
