/* A tool of ours, as tests start it: hands what it was given to the fork server, and ends as the server's process does.

   Where there is no server, or it refuses, this process becomes the tool itself. SOCKET, PYTHON and BIN are given to the
   compiler; without a BIN it is a Python. */
#define _GNU_SOURCE
#include <dirent.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 253 }; /* files that one message takes: SCM_MAX_FD */

/* Put the numbers of all open files into *numbers*; return how many there are, or -1. */
static int open_files(int *numbers)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    if (folder == NULL) return -1;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        int number = atoi(entry->d_name);
        if (entry->d_name[0] == '.' || number == dirfd(folder)) continue;
        if (count == MOST) {
            closedir(folder);
            return -1;
        }
        numbers[count++] = number;
    }
    closedir(folder);
    return count;
}

/* Send the files to the server; return whether it took them. */
static int send_files(int server, const int *numbers, int count)
{
    union { /* aligned as its header must be */
        struct cmsghdr header;
        char space[CMSG_SPACE(MOST * sizeof(int))];
    } control;
    int message[MOST + 1] = {count}; /* no message is empty */
    memcpy(message + 1, numbers, count * sizeof(int));
    struct iovec data = {message, (count + 1) * sizeof(int)};
    struct msghdr all = {.msg_iov = &data, .msg_iovlen = 1};
    if (count) {
        all.msg_control = &control;
        all.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&all);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(header), numbers, count * sizeof(int));
    }
    return sendmsg(server, &all, MSG_NOSIGNAL) == (ssize_t)data.iov_len;
}

/* Pass all signals on to process *pid*, until the server sends how it ended; end in the same way. */
static int follow(int server, pid_t pid, const sigset_t *all)
{
    int status, signals = signalfd(-1, all, SFD_CLOEXEC);
    for (;;) {
        struct pollfd waiting[] = {{.fd = server, .events = POLLIN}, {.fd = signals, .events = POLLIN}};
        struct signalfd_siginfo caught;
        if (poll(waiting, 2, -1) < 0) continue;
        if (waiting[0].revents) break;
        if (read(signals, &caught, sizeof caught) == sizeof caught && caught.ssi_signo != SIGCHLD)
            kill(pid, caught.ssi_signo);
    }
    if (read(server, &status, sizeof status) != sizeof status) {
        fputs("the fork server has ended\n", stderr);
        return 70; /* EX_SOFTWARE */
    }
    if (WIFSIGNALED(status)) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(WTERMSIG(status), SIG_DFL);
        sigprocmask(SIG_UNBLOCK, all, NULL);
        raise(WTERMSIG(status));
    }
    return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    int numbers[MOST], count = open_files(numbers);
    pid_t pid = 0;
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    if (count >= 0 && connect(server, (struct sockaddr *)&address, sizeof address) == 0
        && send_files(server, numbers, count) && read(server, &pid, sizeof pid) == sizeof pid && pid > 0) {
        for (int i = 0; i < count; i++) close(numbers[i]); /* whose other ends would wait for this process */
        return follow(server, pid, &all);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (!*BIN) {
        argv[0] = PYTHON;
        execv(PYTHON, argv);
        perror(PYTHON);
        return 127;
    }
    const char *name = strrchr(argv[0], '/');
    char tool[PATH_MAX];
    char *words[argc + 2];
    snprintf(tool, sizeof tool, "%s/%s", BIN, name ? name + 1 : argv[0]);
    words[0] = PYTHON;
    words[1] = tool;
    memcpy(words + 2, argv + 1, argc * sizeof *argv); /* with the NULL at its end */
    execv(PYTHON, words);
    perror(PYTHON);
    return 127;
}
