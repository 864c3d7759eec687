// Run numbered pieces of work on several threads. Who runs a piece never changes what it computes.
// The threads are our own and wait asleep. A caller does not wait for a helper that has not come, only for pieces that
// one has begun: on a busy machine a call is then no slower than on one thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>

struct Job {
    void (*run)(const void *, long);
    const void *work;
    long pieces;
    std::atomic<long> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;

    void help() {
        for (long i; (i = next.fetch_add(1)) < pieces;) {
            run(work, i);
            if (done.fetch_add(1) + 1 == pieces) {
                std::lock_guard<std::mutex> lock(mutex);
                finished.notify_all();
            }
        }
    }
};

class Helpers {
    std::mutex mutex;
    std::condition_variable called;
    std::shared_ptr<Job> job;
    long calls = 0;
    int wanted = 0, threads = 0;
    pid_t owner = getpid();

    void loop() {
        long seen = 0;
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            called.wait(lock, [&] { return calls != seen && wanted > 0; });
            seen = calls;
            wanted--;
            std::shared_ptr<Job> mine = job;
            lock.unlock();
            mine->help();
        }
    }

  public:
    void call(const std::shared_ptr<Job> &fresh, int helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            for (; threads < helpers; threads++) std::thread([this] { loop(); }).detach();
            job = fresh;
            wanted = helpers;
            calls++;
        }
        for (int i = 0; i < helpers; i++) called.notify_one();
    }

    // Of this process: a fork has none of its parent's threads. Never destroyed, for its threads outlive main.
    static Helpers &ours() {
        static std::mutex making;
        static Helpers *helpers = nullptr;
        std::lock_guard<std::mutex> lock(making);
        if (!helpers || helpers->owner != getpid()) helpers = new Helpers;
        return *helpers;
    }
};

template <class F> static void parallel(long pieces, int threads, const F &piece) {
    int helpers = (int)(threads < pieces ? threads : pieces) - 1;
    if (helpers < 1) {
        for (long i = 0; i < pieces; i++) piece(i);
        return;
    }
    auto job = std::make_shared<Job>();
    job->run = [](const void *work, long i) { (*(const F *)work)(i); };
    job->work = &piece;
    job->pieces = pieces;
    Helpers::ours().call(job, helpers);
    job->help();
    std::unique_lock<std::mutex> lock(job->mutex);
    job->finished.wait(lock, [&] { return job->done.load() == pieces; });
}
